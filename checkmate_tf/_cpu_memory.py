"""Has TensorFlow count what a CPU's memory holds, without loading TensorFlow.

oneDNN brings an allocator that counts. TensorFlow turns oneDNN on by itself only on CPUs with instructions for neural
networks; elsewhere memory comes from the system and nobody counts it, unless TF_CPU_ALLOCATOR_USE_BFC asks for the
best-fit allocator that GPUs have. That is read when TensorFlow makes its first tensor.

References:
    TensorFlow, `core/util/port.cc` (`IsMklEnabled`) and `core/common_runtime/process_state.cc` (`GetCPUAllocator`).
"""

from __future__ import annotations

import os
import pathlib

INSTRUCTIONS_FOR_ONEDNN = ("avx512_vnni", "avx512_bf16", "avx_vnni", "amx_tile", "amx_int8", "amx_bf16")


def count() -> None:
    """Asks for an allocator that counts where there would be none. What the environment says already stays."""
    if _has_onednn():
        return
    os.environ.setdefault("TF_CPU_ALLOCATOR_USE_BFC", "1")
    if hasattr(os, "sysconf"):  # else TensorFlow's own limit: 64 GiB, whatever the machine has
        physical_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        os.environ.setdefault("TF_CPU_BFC_MEM_LIMIT_IN_MB", str(physical_bytes >> 20))


def described(cpuinfo: pathlib.Path = pathlib.Path("/proc/cpuinfo")) -> dict[str, str]:
    """What Linux says of the CPU; nothing elsewhere."""
    if not cpuinfo.exists():
        return {}
    lines = (line.partition(":") for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines())
    return {key.strip(): value.strip() for key, colon, value in lines if colon}


def _has_onednn() -> bool:
    asked = os.environ.get("TF_ENABLE_ONEDNN_OPTS", "").lower()
    if asked in ("0", "false", "1", "true"):
        return asked in ("1", "true")
    return not set(INSTRUCTIONS_FOR_ONEDNN).isdisjoint(described().get("flags", "").split())

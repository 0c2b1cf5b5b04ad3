"""Where TensorFlow would not count a CPU's memory, it is asked to, unless the user has decided otherwise."""

import os

import pytest

from checkmate_tf import _cpu_memory

BFC = "TF_CPU_ALLOCATOR_USE_BFC"


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch):
    for name in (BFC, "TF_CPU_BFC_MEM_LIMIT_IN_MB", "TF_ENABLE_ONEDNN_OPTS"):
        monkeypatch.setenv(name, "")  # so that it is set back as it was
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("asked", "flags", "set_to"),
    [
        (None, "sse2 avx2", "1"),
        (None, "sse2 avx2 avx512f avx512_vnni", None),
        (None, "avx_vnni", None),
        (None, None, "1"),
        ("0", "avx512_vnni", "1"),
        ("False", "avx512_vnni", "1"),
        ("1", "avx2", None),
        ("perhaps", "avx2", "1"),  # TensorFlow warns and decides by the CPU
    ],
)
def test_memory_is_counted_where_onednn_does_not(monkeypatch, asked, flags, set_to):
    monkeypatch.setattr(_cpu_memory, "described", lambda: {} if flags is None else {"flags": flags})
    if asked is not None:
        monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", asked)
    _cpu_memory.count()
    assert os.environ.get(BFC) == set_to
    assert ("TF_CPU_BFC_MEM_LIMIT_IN_MB" in os.environ) == (set_to is not None)


def test_what_the_user_has_set_stays(monkeypatch):
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "0")
    monkeypatch.setenv(BFC, "0")
    monkeypatch.setenv("TF_CPU_BFC_MEM_LIMIT_IN_MB", "900")
    _cpu_memory.count()
    assert (os.environ[BFC], os.environ["TF_CPU_BFC_MEM_LIMIT_IN_MB"]) == ("0", "900")


def test_what_linux_says_of_a_cpu(tmp_path):
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nmodel name\t: A: B\nflags\t\t: fpu avx2\n\nprocessor\t: 1\n")
    assert _cpu_memory.described(file) == {"processor": "1", "model name": "A: B", "flags": "fpu avx2"}
    assert _cpu_memory.described(tmp_path / "none") == {}

"""What is to be known from a GPU, item by item: one command, each row written as soon as it is there.

    python experiments/gpu.py                              # all items, results/gpu.json
    python experiments/gpu.py --items plain planned --cases ResNet50 --out /tmp/gpu.json
    python experiments/gpu.py --device cpu --small         # every item at toy sizes, to try the command itself

Each row comes from a process of its own with a time limit. Several run at a time, each with its part of the card's
memory; whatever is timed on the card has it alone, compilers share it. Items, the most important first:

    check       which flags XLA needs to run at all; the others take those that were found
    plain       Keras as it comes ("auto": XLA, on a GPU) and without XLA ("off"): step time and peak
    planned     planned steps within a part of the peak of Keras as it comes: as one program of XLA's, or op by op
    copies      blocks to the host and back, beside ops
    replicas    Keras's step on two logical devices
    wall        a memory limit just above the budget: Keras as it comes, without XLA, and planned
    recurrent   LSTM and GRU, plain and planned
    workspace   VGG16 without XLA at limits below its peak: which convolutions are left
    barriers    does XLA keep a recomputation that is behind optimization barriers
    groups      strings of small ops by kernels and compiled as one
    allocator   what memory statistics say of cudaMallocAsync, and plans where memory grows

A command that is interrupted goes on where it ended; rows that hold an error are tried again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence

from recording import KERAS_PACKAGES, RESULTS, ResultFile

KEY = ("item", "case", "way")
MODELS = ("ResNet50", "Transformer", "MobileNet", "ViT", "VGG16", "U-Net", "pre-norm Transformer")
RECURRENT = ("LSTM", "GRU")
PLANS = (("auto", 0.5), ("auto", 0.35), ("off", 0.5))  # compiled with XLA as Keras decides, or without; part
WALLS = {"ResNet50": 0.5, "Transformer": 0.5, "VGG16": 0.6}
NO_GPU = "TensorFlow sees no GPU."
WALL_MARGIN = 0.05  # of the budget, between it and the limit
WORKSPACE_PARTS = (0.85, 0.7, 0.6)  # of the plain peak
BARRIER_WAYS = (
    "stored by ops",
    "stored",
    "again",
    "again, inputs behind barriers",
    "again, inputs and gradients behind barriers",
)
GROUPS = ("layer norm + GELU", "batch norm + ReLU", "scale + softmax + dropout", "dropout + residual sum")
_BY_PTXAS = "--xla_gpu_enable_libnvjitlink=false --xla_gpu_enable_libnvptxcompiler=false"
_NO_GRAPHS = "--xla_gpu_enable_command_buffer="
SIZES = ("large", "tiny")
XLA_VARIANTS = {
    "as it is": "",
    "by ptxas": _BY_PTXAS,
    "by ptxas, no graphs": f"{_BY_PTXAS} {_NO_GRAPHS}",
    "by ptxas, no graphs, nothing tried": f"{_BY_PTXAS} {_NO_GRAPHS} --xla_gpu_autotune_level=0 "
    "--xla_gpu_enable_cublaslt=false",
}
_MIB = 1 << 20
_POLL_S = 0.1
_SAID, _TOLD = 1500, 300  # letters of what a failed process said: kept, shown


@dataclasses.dataclass(frozen=True)
class Job:
    """One row, and how its process is run.

    Attributes:
        item: Of which item.
        case: Model or subject.
        way: What is done with it.
        run: Name of a runner in `work`.
        options: Its arguments.
        limit_s: Seconds after which it is ended.
        part: Of the plain peak of the case: the budget, or for "workspace" the limit.
        is_wall: Whether the process has no more memory than its budget and a margin.
        env: Environment beyond the usual.
        devices: Logical devices that it sees.
        spreads: Whether it may run on all cores: it compiles, or its ops wait for the host. Others search meanwhile,
            on cores that are theirs.
    """

    item: str
    case: str
    way: str
    run: str
    options: Mapping = dataclasses.field(default_factory=dict)
    limit_s: float = 150.0
    part: float | None = None
    is_wall: bool = False
    env: Mapping = dataclasses.field(default_factory=dict)
    devices: int = 1
    spreads: bool = False

    @property
    def key(self) -> tuple[str, str, str]:
        return self.item, self.case, self.way


def jobs(time_limit_s: float) -> list[Job]:
    """All jobs but the checks, the most important first."""

    def plain(item: str, case: str, way: str, **more) -> Job:
        return Job(item, case, way, "plain", {"name": case, "way": way}, limit_s=300.0, spreads=True, **more)

    def planned(item: str, case: str, xla: str, part: float, way: str, **more) -> Job:
        options = {"name": case, "way": xla, "time_limit_s": time_limit_s}
        return Job(item, case, way, "planned", options, limit_s=300.0, part=part, **more)

    growing, pooled = {"TF_FORCE_GPU_ALLOW_GROWTH": "true"}, {"TF_GPU_ALLOCATOR": "cuda_malloc_async"}
    return [
        *(plain("plain", case, "auto") for case in MODELS),
        *(plain("plain", case, "off") for case in MODELS),
        *(planned("planned", case, how, part, f"{how} {part}") for how, part in PLANS for case in MODELS),
        *(Job("copies", op, "blocks", "copies", {"op": op}) for op in ("matmul", "tanh")),
        Job("replicas", "MobileNet", "mirrored", "mirrored", {"name": "MobileNet"}, devices=2),
        *(
            dataclasses.replace(job, is_wall=True, part=part)
            for case, part in WALLS.items()
            for job in (
                planned("wall", case, "auto", part, "planned"),
                plain("wall", case, "auto"),
                plain("wall", case, "off"),
            )
        ),
        *(plain("recurrent", case, "auto") for case in RECURRENT),
        *(planned("recurrent", case, "off", 0.6, "off 0.6") for case in RECURRENT),
        *(
            dataclasses.replace(plain("workspace", "VGG16", "off"), way=f"limit {part}", part=part)
            for part in WORKSPACE_PARTS
        ),
        *(Job("barriers", "dense + GELU", way, "barriers", {"way": way}) for way in BARRIER_WAYS),
        *(Job("groups", name, size, "group", {"name": name, "size": size}) for size in SIZES for name in GROUPS),
        Job("allocator", "blocks", "cuda_malloc_async", "blocks", env=pooled),
        Job("allocator", "blocks", "best fit", "blocks"),
        dataclasses.replace(plain("allocator", "MobileNet", "off", env=pooled), way="off, cuda_malloc_async"),
        planned("allocator", "MobileNet", "auto", 0.5, "auto 0.5, cuda_malloc_async", env=pooled),
        planned("allocator", "MobileNet", "auto", 0.5, "auto 0.5, memory grows", env=growing),
    ]


def checks(data_dir: str | None) -> list[Job]:
    """Tries of XLA, each with other flags."""
    root = f"--xla_gpu_cuda_data_dir={data_dir} " if data_dir else ""
    return [
        Job("check", "XLA", name, "check", limit_s=90, env={"XLA_FLAGS": root + flags})
        for name, flags in XLA_VARIANTS.items()
    ]


def cuda_data_dir(scratch: pathlib.Path) -> str | None:
    """A folder with `ptxas` and `libdevice` where XLA looks for them; None where there are none.

    Args:
        scratch: Where it is put together of links, if it must be.
    """
    packages = pathlib.Path(sysconfig.get_paths()["purelib"])
    roots = [
        *sorted(pathlib.Path("/usr/local").glob("cuda*")),
        packages / "nvidia",
        packages / "triton/backends/nvidia",
    ]
    wanted = {"bin/ptxas": "bin/ptxas", "nvvm/libdevice/libdevice.10.bc": "libdevice.10.bc"}
    whole = next((root for root in roots if all((root / place).exists() for place in wanted)), None)
    if whole is not None:
        return str(whole)
    for place, pattern in wanted.items():
        found = next((file for root in roots if root.exists() for file in root.rglob(pattern)), None)
        if found is None:
            return None
        link = scratch / "cuda" / place
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(found)
    return str(scratch / "cuda")


def card() -> dict:
    """Name, driver and memory of the first GPU."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    if shutil.which(command[0]) is None:
        return {"card": "CPU"}
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    return dict(zip(("card", "driver", "memory"), (part.strip() for part in said.split(",")), strict=True))


class Runner:
    """Runs jobs, several at a time, and keeps what they find.

    Args:
        result: Where rows go.
        scratch: Folder for locks, caches and what processes print.
        args: Of the command line.
        until: Value of `time.monotonic` at which all ends.
    """

    def __init__(self, result: ResultFile, scratch: pathlib.Path, args: argparse.Namespace, until: float):
        self._result, self._scratch, self._args, self._until = result, scratch, args, until
        self._running: dict[int, _Running] = {}
        self._started = time.monotonic()
        cores = sorted(os.sched_getaffinity(0))
        self._cores = [cores[k :: args.workers] or cores for k in range(args.workers)]

    def run(self, todo: Sequence[Job], env: Mapping[str, str]) -> None:
        """Runs jobs in their order, but those first whose budgets are known."""
        pending = [job for job in todo if not self._is_done(job)]
        while (pending or self._running) and time.monotonic() < self._until:
            for slot in set(range(self._args.workers)) - self._running.keys():
                waiting = {job.key for job in [*pending, *(running.job for running in self._running.values())]}
                ready = next((job for job in pending if self._is_ready(job, waiting)), None)
                if ready is not None:
                    pending.remove(ready)
                    self._start(slot, ready, env)
            time.sleep(_POLL_S)
            self._collect()
        for slot in list(self._running):
            self._end(slot, "no time was left.")

    def working(self, tries: Sequence[Job]) -> Mapping[str, str]:
        """The environment of the first try that works. Others are made where the first one does not.

        Raises:
            SystemExit: There is no GPU.
        """
        for some in (tries[:1], tries[1:]):
            self.run(some, {})
            works = [job for job in some if self._is_done(job)]
            if works:
                return works[0].env
            if NO_GPU in (self._row(some[0].key) or {}).get("error", ""):
                raise SystemExit(NO_GPU)
        return {}

    def _is_done(self, job: Job) -> bool:
        return "error" not in (self._row(job.key) or {"error": ""})

    def _row(self, key: tuple) -> dict | None:
        return next((row for row in self._result.rows if tuple(row[name] for name in KEY) == key), None)

    def _bases(self, job: Job) -> list[tuple]:
        """Where the plain peak of a job's case is found: Keras as it comes, else without XLA."""
        item = "recurrent" if job.case in RECURRENT else "plain"
        ways = ("off",) if job.item == "workspace" else ("auto", "off")
        return [(item, job.case, way) for way in ways] if job.part is not None else []

    def _is_ready(self, job: Job, waiting: set[tuple]) -> bool:
        bases = self._bases(job)
        first = next((key for key in bases if key in waiting or self._peak(key)), None)
        return not bases or first is None or first not in waiting

    def _peak(self, key: tuple) -> int | None:
        return (self._row(key) or {}).get("peak_bytes")

    def _start(self, slot: int, job: Job, env: Mapping[str, str]) -> None:
        options, limit_mib = dict(job.options), self._args.limit_mib // job.devices
        common = {"item": job.item, "case": job.case, "way": job.way}
        if job.part is not None:
            plain_peak = next((peak for key in self._bases(job) if (peak := self._peak(key))), None)
            if plain_peak is None:
                self._add(common | {"error": "the plain peak is not known."})
                return
            allowed = int(job.part * plain_peak)
            common["plain_peak_bytes"] = plain_peak
            if job.run == "planned":
                options |= {"budget_bytes": allowed, "cache_dir": str(self._scratch / "cache" / job.case)}
            if job.is_wall or job.item == "workspace":
                limit_mib = -(-int((1 + WALL_MARGIN * job.is_wall) * allowed) // _MIB)
                common["limit_bytes"] = limit_mib * _MIB
        spec = {"run": job.run, "options": options, "limit_mib": limit_mib, "devices": job.devices}
        spec["on"] = self._args.device
        spec |= {"lock": str(self._scratch / self._lock(job)), "small": self._args.small}
        name = "-".join(job.key).replace(" ", "_").replace(",", "")
        files = {kind: self._scratch / f"{name}.{kind}" for kind in ("json", "txt")}
        files["json"].unlink(missing_ok=True)
        here = dict(os.environ) | env | job.env | {"TF_CPP_MIN_LOG_LEVEL": "2"}
        if self._args.device == "cpu":
            here |= {"CUDA_VISIBLE_DEVICES": "", "TF_CPU_ALLOCATOR_USE_BFC": "1", "TF_ENABLE_ONEDNN_OPTS": "0"}
            here |= {"TF_CPU_BFC_MEM_LIMIT_IN_MB": str(limit_mib)} if "limit_bytes" in common else {}
        command = [sys.executable, __file__, "--worker", json.dumps(spec), "--out", str(files["json"])]
        with files["txt"].open("w") as said:
            process = subprocess.Popen(command, stdout=said, stderr=said, env=here, process_group=0)
        if not job.spreads:
            os.sched_setaffinity(process.pid, self._cores[slot])
        self._running[slot] = _Running(job, process, time.monotonic(), common, files)

    @staticmethod
    def _lock(job: Job) -> str:
        """Which file it locks: nobody waits for plain steps at a wall, which run out of memory for 10 s."""
        return "lock-at-the-wall" if job.is_wall and job.run == "plain" else "lock"

    def _collect(self) -> None:
        for slot, running in list(self._running.items()):
            if running.process.poll() is not None:
                self._end(slot, "it failed.")
            elif time.monotonic() - running.since > running.job.limit_s:
                self._end(slot, f"it took more than {running.job.limit_s:.0f} s.")

    def _end(self, slot: int, why: str) -> None:
        """Keeps what a job has found, or why it has found nothing, and ends it where it still runs."""
        running = self._running.pop(slot)
        if running.process.poll() is None:
            os.killpg(running.process.pid, 9)
            running.process.wait()
        found = json.loads(running.files["json"].read_text()) if running.files["json"].exists() else None
        if found is None:
            found = {"error": f"{why} {running.files['txt'].read_text(errors='replace')[-_SAID:]}"}
        self._add(running.common | found | {"seconds": round(time.monotonic() - running.since, 1)})

    def _add(self, row: dict) -> None:
        self._result.add([row])
        print(f"{time.monotonic() - self._started:6.1f} s  {told(row)}", flush=True)


@dataclasses.dataclass(frozen=True)
class _Running:
    """A job whose process runs."""

    job: Job
    process: subprocess.Popen
    since: float
    common: dict
    files: dict[str, pathlib.Path]


def told(row: dict) -> str:
    """A row in one line."""
    left_out = {
        *KEY,
        "error",
        "why",
        "device",
        "notes",
        "peaks_bytes",
        "losses",
        "phases_s",
        "rules",
        "nodes_of_devices",
    }
    shown = []
    for name, value in row.items():
        if name not in left_out and value is not None:
            if name.endswith("_bytes"):
                shown.append(f"{name.removesuffix('_bytes')} {value / _MIB:.0f} MiB")
            else:
                shown.append(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")
    if "why" in row:
        shown.append(row["why"][:_TOLD])
    error = f"ERROR ...{row['error'][-_TOLD:]} " if "error" in row else ""
    return f"{' / '.join(row[name] for name in KEY)}: {error}{', '.join(shown)}"


def beside(rows: Sequence[dict]) -> list[str]:
    """Planned rows beside both plain ones, a line each."""
    plain = {(row["case"], row["way"]): row for row in rows if row["item"] in ("plain", "recurrent")}
    lines = []
    for row in rows:
        if "predicted_peak_bytes" not in row or "step_s" not in row:
            continue
        parts = [f"peak {row['peak_bytes'] / row['plain_peak_bytes']:.3f} of plain"]
        parts += [f"predicted {100 * (row['predicted_peak_bytes'] / row['peak_bytes'] - 1):+.2f} %"]
        parts += ["within budget" if row["within_budget"] else "OVER BUDGET"]
        for way in ("auto", "off"):
            if "step_s" in (base := plain.get((row["case"], way), {})):
                ratios = [row[name] / base[name] for name in ("step_s", "step_in_a_row_s")]
                parts.append("time / {} {:.3f}, in a row {:.3f}".format(way, *ratios))
        lines.append(f"{' / '.join(row[name] for name in KEY)}: {', '.join(parts)}")
    return lines


def work(spec: dict) -> dict:
    """What one process does."""
    import gpu_card
    import gpu_kernels
    import gpu_training
    from real_steps import device

    if spec["on"] == "gpu" and device() == "CPU:0":
        raise SystemExit(NO_GPU)
    gpu_card.divide(spec["limit_mib"], spec["devices"])
    lock, small = gpu_card.Card(spec["lock"]), spec["small"]
    run, options = spec["run"], spec["options"]
    if run == "check":
        return gpu_kernels.xla_works()
    if run == "blocks":
        return gpu_training.statistics_of_the_allocator(_MIB if small else 1 << 30)
    runs = {
        "plain": gpu_training.plain,
        "planned": gpu_training.planned,
        "mirrored": gpu_training.mirrored,
        "copies": gpu_kernels.copies,
        "barriers": gpu_kernels.barriers,
        "group": gpu_kernels.group,
    }
    return runs[run](lock, **options, small=small) | {"was_alone": lock.was_alone}


def parsed() -> argparse.Namespace:
    items = list(dict.fromkeys(["check", *(job.item for job in jobs(1.0))]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", nargs="+", choices=items, default=items)
    parser.add_argument("--cases", nargs="+", help="models or subjects (default: all)")
    parser.add_argument("--device", choices=["gpu", "cpu"], default="gpu")
    parser.add_argument("--small", action="store_true", help="toy sizes")
    parser.add_argument("--seconds", type=float, default=3600.0, help="after which all ends")
    parser.add_argument("--workers", type=int, help="processes at a time (default: 7; on a CPU 1)")
    parser.add_argument("--limit-mib", type=int, default=9728, help="memory of each on a GPU (default: 9.5 GiB)")
    parser.add_argument("--time-limit", type=float, default=15.0, help="seconds of search for each plan")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS / "gpu.json")
    parser.add_argument("--logs", type=pathlib.Path, help="folder for what processes print (default: one that is gone)")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.workers = args.workers or (7 if args.device == "gpu" else 1)
    return args


def main() -> int:
    args = parsed()
    if args.worker:
        args.out.write_text(json.dumps(work(json.loads(args.worker))))
        return 0
    until = time.monotonic() + args.seconds
    settings = {"small": args.small, "time_limit_s": args.time_limit, "memory_limit_mib": args.limit_mib}
    settings |= {"processes": args.workers, **(card() if args.device == "gpu" else {"card": "CPU"})}
    result = ResultFile(args.out, settings, KEY, KERAS_PACKAGES)
    with tempfile.TemporaryDirectory() as folder:
        scratch = args.logs or pathlib.Path(folder)
        scratch.mkdir(parents=True, exist_ok=True)
        runner = Runner(result, scratch, args, until)
        env = runner.working(checks(cuda_data_dir(scratch)))
        asked = [job for job in jobs(args.time_limit) if job.item in args.items]
        runner.run([job for job in asked if not args.cases or job.case in args.cases], env)
    print("\n".join(beside(result.rows)))
    return int(any("error" in row for row in result.rows))


if __name__ == "__main__":
    sys.exit(main())

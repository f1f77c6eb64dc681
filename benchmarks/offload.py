"""DeepSpeed's CPU offload through `shoal train`: models that a card does not hold without it, beside DeepSpeed by hand.

    python benchmarks/offload.py [--only curve,host,24,48,80,whole] [--out FILE]      one NVIDIA GPU
    python benchmarks/offload.py --tiny                                            the same script on a CPU, tiny

curve   losses and gradient norms with offload beside those without, ZeRO 2 and 3, float32 and bf16
host    what the CPU's part costs here: the optimizer, the norm, copies
24, 48, 80  a card of so many GiB: another process holds the rest of this one
whole   all of this one

Each row of a card: the run without offload (what it says when it ends), with it, and DeepSpeed by hand with the same
model, batch and precision; and as DeepSpeed's own pages have it. Tokens/s are of the median step after the first; the
peaks are of the whole card (without what holds the rest) and of the machine's memory, above what was taken before.
DeepSpeed has to be on PYTHONPATH (scripts/fetch_deepspeed.py).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30
LIMIT_S = 240.0  # of one system


@dataclass(frozen=True)
class Card:
    gib: int | None  # None: all of it
    model: dict[str, int]
    batch: int
    seq: int
    recompute: str
    systems: tuple[str, ...]
    steps: int = 5


def llama(layers: int, dim: int = 4096, ffn: int = 14336, heads: int = 32, vocab: int = 32000) -> dict[str, int]:
    return {"dim": dim, "layers": layers, "heads": heads, "kv_heads": heads // 4, "ffn_dim": ffn, "vocab_size": vocab}


SHOAL = {  # what is said to `shoal train`
    "native": ("engine.name=native",),
    "zero 2": ("engine.name=deepspeed", "engine.zero=2"),
    "zero 3": ("engine.name=deepspeed", "engine.zero=3"),
    "zero 2, offload": ("engine.name=deepspeed", "engine.zero=2", "engine.offload=cpu"),
    "zero 3, offload": ("engine.name=deepspeed", "engine.zero=3", "engine.offload=cpu"),
}
BY_HAND = {"by hand, zero 2": ("as shoal", 2), "by hand, zero 3": ("as shoal", 3), "as usual, zero 2": ("usual", 2)}
# torch rounds locked memory up to a power of two, and DeepSpeed by hand has it three times: 18 layers are just below
# 16 GiB in float32, and 8 below 8 GiB. Shoal's part takes no more than is asked for.
CARDS = {
    "24": Card(
        24, llama(8), 4, 2048, "full",
        ("zero 3, offload", "by hand, zero 3", "zero 2, offload", "by hand, zero 2", "as usual, zero 2"),
    ),
    "48": Card(48, llama(18), 8, 2048, "full", ("zero 2, offload", "by hand, zero 2", "native")),
    "80": Card(80, llama(24), 8, 2048, "full", ("zero 2, offload", "zero 2", "native")),
    "whole": Card(None, llama(32), 2, 4096, "none", ("native", "zero 2, offload", "zero 2"), 4),
}  # fmt: skip
TINY = {
    "48": Card(None, llama(2, 64, 128, 4, 512), 4, 64, "full", ("native", *list(SHOAL)[3:], *list(BY_HAND)[:2])),
}
CURVE = {
    "zero 2": ("engine.zero=2",),
    "zero 2, offload": ("engine.zero=2", "engine.offload=cpu"),
    "zero 3": ("engine.zero=3",),
    "zero 3, offload": ("engine.zero=3", "engine.offload=cpu"),
    "zero 2, offload, 2 micro-batches": ("engine.zero=2", "engine.offload=cpu", "mesh.micro_batch=4"),
    "zero 2, bf16": ("engine.zero=2", "train.precision=bf16"),
    "zero 2, offload, bf16": ("engine.zero=2", "engine.offload=cpu", "train.precision=bf16"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--systems", default="", help="of cards, separated by semicolons; else those that each has")
    parser.add_argument("--tiny", action="store_true", help="on the CPU, to try the script")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # what was started is ended with it
    device, cards = ("cpu", TINY) if args.tiny else ("cuda", CARDS)
    told: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as at:
        place = Place(Path(at), device)
        place.prepare()
        for name in args.only.split(",") if args.only else ["host", "curve", *cards]:
            if name == "host":
                told[name] = host(1 << (20 if args.tiny else 29), device)
            elif name == "curve":
                told[name] = curve(place, args.tiny)
            else:
                card = cards[name]
                systems = tuple(s.strip() for s in args.systems.split(";")) if args.systems else card.systems
                told[name] = {}
                with rest_held(card.gib if device == "cuda" else None):
                    for system in systems:
                        told[name][system] = row = place.measured(card, system)
                        print(f"{name:6} {system:20} {shown(row)}", flush=True)
                        if args.out:
                            args.out.write_text(json.dumps(told, indent=1))
                for one, other in (("zero 2, offload", "by hand, zero 2"), ("zero 3, offload", "by hand, zero 3"),
                                   ("zero 2, offload", "as usual, zero 2")):  # fmt: skip
                    both = [told[name].get(s, {}).get("tokens_s") for s in (one, other)]
                    if all(both):
                        print(f"{name:6} {one}: {both[0] / both[1]:.3f} of {other}", flush=True)
            if args.out:
                args.out.write_text(json.dumps(told, indent=1))
    return 0


def shown(row: dict[str, Any]) -> str:
    if "ended" in row:
        return f"{row['ended']}  (after {row['s']} s, GPU {row['gpu_gib']} GiB, host {row['host_gib']} GiB)"
    return (
        f"{row['tokens_s']:8,.0f} tokens/s, a step {row['step_s']} s, first after {row['first_step_s']} s; "
        f"GPU {row['gpu_gib']} GiB, host {row['host_gib']} GiB; {row.get('time', '')}"
    )


# Rows of a card


@dataclass
class Place:
    """A workspace on this machine."""

    folder: Path
    device: str
    number: int = 0
    params: dict[str, int] = field(default_factory=dict)

    def prepare(self) -> None:
        text = ROOT / "examples/text/moby-dick.txt"
        shoal(self.folder, "data", "prepare", str(text), "--separator", r"\n\n\n", "--out", "data").check_returncode()

    def run(self, name: str, *asked: str) -> list[str]:
        usual = ["train.batch=8", "train.clip=1.0", "train.optimizer.lr=3e-4", "train.schedule.warmup_steps=1"]
        (self.folder / "run.yaml").write_text("name: run\nmodel: {dim: 64}\ndata: {train: data, seq_len: 64}\n")
        quiet = ["checkpoint.every=0", "track.mlflow=false", "guard.spikes=off", "guard.hang=off", "guard.restarts=0"]
        about = [f"resources.device={self.device}", "resources.processes=1", "data.mask_documents=false"]
        return ["train", "run.yaml", f"name={name}", *usual, *quiet, *about, *asked]

    def steps(self, name: str) -> list[dict[str, Any]]:
        file = self.folder / "runs" / name / "journal.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [r for r in map(json.loads, lines) if r["kind"] == "step"]

    def measured(self, card: Card, system: str) -> dict[str, Any]:
        self.number += 1
        name, began = f"run-{self.number}", time.time()
        if system in SHOAL:
            model = [f"model.{key}={value}" for key, value in card.model.items()]
            model += [
                "model.tie_embeddings=false",
                f"mesh.recompute={card.recompute}",
                f"mesh.micro_batch={card.batch}",
            ]
            size = [f"train.steps={card.steps}", f"train.batch={card.batch}", f"data.seq_len={card.seq}"]
            argv = ["-m", "shoal", *self.run(name, *model, *size, "train.precision=bf16", *SHOAL[system])]
        else:
            how, zero = BY_HAND[system]
            asked = {
                "how": how, "zero": zero, "device": self.device, "batch": card.batch, "seq": card.seq,
                "steps": card.steps, "recompute": card.recompute, "model": card.model, "data_vocab": 257,
            }  # fmt: skip
            argv = ["-m", "benchmarks.one_gpu.run_deepspeed", json.dumps(asked)]
        with Peaks(self.device) as peaks:
            code, out = started(argv, self.folder)
        row: dict[str, Any] = {"s": round(time.time() - began), **peaks.told()}
        if system in SHOAL:
            steps = self.steps(name)
            begins, losses = [r["begin"] for r in steps], [r["loss"] for r in steps]
            first = begins[1] - began if len(begins) > 1 else 0.0
            if steps:
                row["time"] = steps[-1]["time"]
            shutil.rmtree(self.folder / "runs" / name, ignore_errors=True)
        else:
            said = next((json.loads(line) for line in reversed(out.splitlines()) if line.startswith('{"begins"')), {})
            begins, losses, first = said.get("begins", []), said.get("losses", []), said.get("first_step_s", 0.0)
        if len(begins) <= 2 or (code and len(losses) < card.steps):
            return row | {"ended": sentence(out) + f" [exit {code}]", "tail": out[-1500:]}
        took = [b - a for a, b in itertools.pairwise(begins[1:])]
        step_s = median(took)
        return row | {
            "tokens_s": round(card.batch * card.seq / step_s, 1),
            "step_s": round(step_s, 3),
            "steps_s": [round(t, 3) for t in took],
            "first_step_s": round(first, 1),
            "losses": losses,
        }


def sentence(out: str) -> str:
    """What it ended with: the line that says why."""
    lines = [line.strip() for line in out.splitlines() if line.strip()]
    why = [line for line in lines if re.search(r"OutOfMemory|out of memory|does not fit|needs? .* GB|no GPU", line)]
    return (why or lines or ["nothing was said"])[-1][:400]


def shoal(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shoal", *argv], cwd=folder, env=environment(), capture_output=True, text=True
    )


def environment() -> dict[str, str]:
    path = os.pathsep.join(p for p in (str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")) if p)
    operators = str(Path(tempfile.gettempdir()) / f"operators-{os.getpid()}")  # a killed build leaves a lock there
    settings = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "TORCH_EXTENSIONS_DIR": operators}  # for all alike
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **settings}


def started(argv: Sequence[str], folder: Path) -> tuple[int, str]:
    """Exit code and all that it wrote; ended after its time, with what it has started."""
    log = folder / "out.log"
    with open(log, "wb") as to:
        process = subprocess.Popen(
            [sys.executable, *argv], cwd=folder, env=environment(), stdout=to, stderr=to, start_new_session=True
        )
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            code = 124
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return code, log.read_text(errors="replace")


@contextlib.contextmanager
def rest_held(gib: int | None) -> Iterator[None]:
    """Another process holds all of the card but this much."""
    if gib is None:
        yield
        return
    code = (
        "import sys, torch; torch.zeros(1, device='cuda'); free, _ = torch.cuda.mem_get_info()\n"
        f"held = torch.empty(free - {gib * GIB}, dtype=torch.uint8, device='cuda')\n"
        "print(torch.cuda.mem_get_info()[0], flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdin is not None
        print(f"free of the card: {int(holder.stdout.readline()) / GIB:.1f} GiB", flush=True)
        try:
            yield
        finally:
            holder.stdin.close()


class Peaks:
    """The most that was taken of the card and of this machine's memory, above what was before, looked at often."""

    def __init__(self, device: str) -> None:
        self._device, self._over = device, threading.Event()
        self._gpu, self._host = [self._on_gpu()], [self._on_host()]
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Peaks:
        self._thread.start()
        return self

    def __exit__(self, *about: object) -> None:
        self._over.set()
        self._thread.join()

    def told(self) -> dict[str, float]:
        taken = ((max(seen) - seen[0]) / GIB for seen in (self._gpu, self._host))
        return dict(zip(("gpu_gib", "host_gib"), (round(t, 1) for t in taken), strict=True))

    def _look(self) -> None:
        while not self._over.wait(0.25):
            self._gpu.append(self._on_gpu())
            self._host.append(self._on_host())

    def _on_gpu(self) -> int:
        if self._device != "cuda":
            return 0
        asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        return int(subprocess.run(asked, capture_output=True, text=True).stdout.split()[0]) << 20

    @staticmethod
    def _on_host() -> int:
        said = dict(re.findall(r"^(\w+):\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE))
        return (int(said["MemTotal"]) - int(said["MemAvailable"])) * 1024


# The curve


def curve(place: Place, tiny: bool) -> dict[str, Any]:
    """All at once: it is not about time."""
    size = llama(2, 64, 128, 4, 512) if tiny else llama(8, 1024, 4096, 16, 8192)
    asked = [f"model.{key}={value}" for key, value in size.items()]
    asked += ["train.steps=8", f"data.seq_len={64 if tiny else 1024}", "train.clip=0.5", "train.precision=fp32"]
    asked += ["resources.threads=4", "mesh.recompute=none", "mesh.micro_batch=8", "engine.name=deepspeed"]
    runs = {}
    for i, (name, more) in enumerate(CURVE.items()):
        command = [sys.executable, "-m", "shoal", *place.run(f"curve-{i}", *asked, *more)]
        with open(place.folder / f"curve-{i}.log", "wb") as log:
            runs[name] = subprocess.Popen(command, cwd=place.folder, env=environment(), stdout=log, stderr=log)
    told = {}
    for i, (name, process) in enumerate(runs.items()):
        if process.wait(LIMIT_S):
            print(f"curve {name}: {(place.folder / f'curve-{i}.log').read_text()[-1500:]}", flush=True)
        told[name] = [(r["loss"], r["grad_norm"]) for r in place.steps(f"curve-{i}")]
    for name, found in told.items():
        reference = told["zero 2, bf16" if "bf16" in name else "zero 2"]
        if name == "zero 2" or len(found) != len(reference) or not found:
            print(f"curve  {name:34} {len(found)} steps, losses {[round(loss, 4) for loss, _ in found]}", flush=True)
            continue
        loss, norm = (max(abs(a[k] / b[k] - 1) for a, b in zip(found, reference, strict=True)) for k in (0, 1))
        print(f"curve  {name:34} {len(found)} steps, loss {loss:.1e}, norm {norm:.1e} from without", flush=True)
    return told


# The host


def host(numbers: int, device: str) -> dict[str, float]:
    """Milliseconds for a billion numbers, by as many threads as there are cores."""
    import torch

    from shoal.parallel.clip import squared

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    p, grad = torch.randn(numbers).requires_grad_(), torch.randn(numbers)
    p.grad = grad
    adamw = torch.optim.AdamW([p], lr=1e-3, fused=True)
    todo = {"AdamW": adamw.step, "times a factor": lambda: grad.mul_(1.0), "norm": lambda: squared([grad])}
    if device == "cuda":
        there, pageable = torch.empty(numbers, device="cuda"), torch.empty(numbers).fill_(0)
        torch.cuda.cudart().cudaHostRegister(grad.data_ptr(), grad.nbytes, 0)
        todo["to the GPU, locked"] = lambda: there.copy_(grad)
        todo["from the GPU, locked"] = lambda: grad.copy_(there)
        todo["to the GPU"] = lambda: there.copy_(pageable)
        todo["from the GPU"] = lambda: pageable.copy_(there)
    told = {}
    for name, do in todo.items():
        times = []
        for _ in range(4):
            began = time.perf_counter()
            do()
            if device == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        told[name] = round(min(times[1:]) * 1e12 / numbers, 1)
        print(f"host   {name:22} {told[name]:8} ms for 1e9 numbers", flush=True)
    if device == "cuda":
        torch.cuda.cudart().cudaHostUnregister(grad.data_ptr())
    return told


if __name__ == "__main__":
    sys.exit(main())

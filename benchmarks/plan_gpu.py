"""Predicted against measured, of Shoal's own trainer on one GPU: the step's time and the peak of memory.

    shoal bench && python benchmarks/plan_gpu.py          bars: median 6% of the time, 8% of the memory, 12 runs or more

What one H200 gave is in data/h200 (`--hardware benchmarks/data/h200 --measured benchmarks/data/h200/runs.json`).
The two untied ones there are `benchmarks/h200.py`'s own, of the same step without the loop around it.
The prediction knows of the machine what `shoal bench` wrote (hardware/*.toml in the workspace), nothing of the runs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.train.tiny import make_data, make_run

from shoal.journal.journal import records
from shoal.journal.rundir import RunDir
from shoal.plan.asked import Asked
from shoal.plan.calibrate import calibrated
from shoal.plan.catalogue import find
from shoal.plan.machine import Machine
from shoal.plan.memory import memory
from shoal.plan.search import priced
from shoal.spec.mesh import Layout, Sizes
from shoal.spec.presets import presets
from shoal.spec.shape import shape_of

STEPS, WARM = 14, 6
UNTIED = "-untied"  # with a head of its own
# preset, windows of a step, windows at once, tokens of a window, recompute, compiled
RUNS: list[tuple[str, int, int, int, str, bool]] = [
    ("100m", 32, 32, 2048, "none", False),
    ("100m", 32, 32, 2048, "none", True),
    ("100m", 8, 8, 8192, "none", True),
    ("qwen3-0.6b", 8, 8, 4096, "none", True),
    ("llama3.2-1b", 8, 8, 4096, "none", True),
    ("llama3.2-1b", 8, 8, 4096, "selective", True),
    ("llama3.2-1b", 8, 8, 4096, "full", True),
    ("llama3.2-1b", 4, 4, 4096, "none", False),
    ("llama3.2-1b", 16, 4, 4096, "none", True),
    ("llama3.2-1b", 2, 2, 16384, "selective", True),
    ("llama3.2-3b", 2, 2, 4096, "none", True),
    ("llama3.2-3b", 4, 4, 4096, "selective", True),
    ("llama3.2-3b", 4, 4, 4096, "full", True),
    ("llama3.2-3b", 4, 4, 4096, "full", False),
    ("llama3.2-3b", 1, 1, 16384, "full", True),
    (f"llama3.2-1b{UNTIED}", 8, 8, 4096, "none", True),
    (f"llama3.2-3b{UNTIED}", 4, 4, 4096, "none", True),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hardware", type=Path, default=Path("hardware"), help="the folder that shoal bench wrote to")
    parser.add_argument("--only", help="runs whose names have one of these (a,b) in them")
    parser.add_argument("--out", type=Path, help="write what was measured there, as JSON")
    parser.add_argument("--measured", type=Path, help="do not run: take what --out wrote")
    args = parser.parse_args()
    runs = [run for run in RUNS if not args.only or any(part in _name(run) for part in args.only.split(","))]
    seen = json.loads(args.measured.read_text()) if args.measured else _measure(runs, args.out)
    return judge(runs, seen, args.hardware)


def _changes(run: tuple[str, int, int, int, str, bool]) -> dict[str, Any]:
    preset, batch, micro, seq, recompute, compiled = run
    model = {f"model.{name}": value for name, value in presets()[preset.removesuffix(UNTIED)].model.items()}
    if preset.endswith(UNTIED):
        model["model.tie_embeddings"] = False
    return {
        **model,
        "model.vocab_size": model.get("model.vocab_size", 32768),
        "resources.device": "cuda",
        "resources.threads": "auto",
        "data.seq_len": seq,
        "data.mask_documents": False,
        "train.steps": STEPS,
        "train.batch": batch,
        "train.precision": "bf16",
        "train.compile": compiled,
        "mesh.micro_batch": micro,
        "mesh.recompute": recompute,
        "track.mlflow": False,
    }


def _name(run: tuple[str, int, int, int, str, bool]) -> str:
    preset, batch, micro, seq, recompute, compiled = run
    return f"{preset}-{batch}-{micro}-{seq}-{recompute}-{'compiled' if compiled else 'eager'}"


def _measure(runs: list[tuple[str, int, int, int, str, bool]], out_file: Path | None) -> dict[str, Any]:
    """Each in a process of its own: peaks of memory and compiled code are a process's. Written down as they come."""
    seen: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        make_data(Path(folder) / "data", documents=40000)
        for run in runs:
            command = [sys.executable, "-m", "tests.gpu.worker_alone", folder]
            about = json.dumps({**_changes(run), "name": _name(run)})
            out = subprocess.run([*command, about, "--no-save"], capture_output=True)
            if out.returncode:
                print(f"{_name(run)}: {out.stderr.decode()[-400:]}", flush=True)
                continue
            told = json.loads(out.stdout.splitlines()[-1])
            times = _step_times(RunDir.of(_name(run), Path(folder)))
            seen[_name(run)] = {"seconds": median(times[WARM:]), "peak_bytes": told["peak_bytes"]}
            print(f"{_name(run)}: {seen[_name(run)]['seconds']:.4f} s, {told['peak_bytes'] / 1e9:.2f} GB", flush=True)
            if out_file:
                out_file.write_text(json.dumps(seen, indent=1))
    return seen


def _step_times(run_dir: RunDir) -> list[float]:
    steps = [r for r in records(run_dir.journal_file) if r["kind"] == "step"]
    return [later["t"] - earlier["t"] for earlier, later in pairwise(steps)]


def judge(runs: list[tuple[str, int, int, int, str, bool]], seen: dict[str, Any], hardware: Path) -> int:
    folders = [hardware] if hardware.exists() else []
    device = find("H200", folders)
    constants, times, sizes = calibrated(device), [], []
    print(f"{'':<46} {'step s':>8} {'plan s':>8} {'off':>7}   {'GB':>6} {'plan':>6} {'off':>7}")
    for run in runs:
        if _name(run) not in seen:
            continue
        told = seen[_name(run)]
        spec = make_run(Path("data"), **{**_changes(run), "name": "planned"})
        shape = shape_of(spec.model)
        asked = Asked(spec, shape, Machine.of(device), 1)
        found = priced(asked, Layout(Sizes(), run[2]), run[4], constants)
        need = memory(spec.model_copy(update={"mesh": _one(spec.mesh, run)}), shape).total
        times.append(found.seconds / told["seconds"] - 1)
        sizes.append(need / told["peak_bytes"] - 1)
        print(
            f"{_name(run):<46} {told['seconds']:>8.4f} {found.seconds:>8.4f} {times[-1]:>+7.1%}   "
            f"{told['peak_bytes'] / 1e9:>6.1f} {need / 1e9:>6.1f} {sizes[-1]:>+7.1%}"
        )
    ok = len(times) >= 12 and _bar("step time", times, 0.06) & _bar("memory", sizes, 0.08)
    return int(not ok)


def _one(mesh: Any, run: tuple[str, int, int, int, str, bool]) -> Any:
    return mesh.model_copy(update={**dict.fromkeys(Sizes.__dataclass_fields__, 1), "micro_batch": run[2]})


def _bar(what: str, off: list[float], bar: float) -> bool:
    middle = median(abs(x) for x in off)
    print(
        f"{'PASS' if middle <= bar else 'MISS'}  {what}: median error {middle:.1%} of {len(off)} runs (bar {bar:.0%})"
    )
    return middle <= bar


if __name__ == "__main__":
    sys.exit(main())

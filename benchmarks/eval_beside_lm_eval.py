"""How many questions a second `shoal eval` and lm-eval's own `hf` model answer, side by side: the same task files, the
same weights, one thread each, in CPU seconds, which other work on the machine disturbs less than a clock.

  uv venv .cache/lm-eval; uv pip install -p .cache/lm-eval lm-eval==0.4.13 torch transformers accelerate
  python scripts/fetch_smollm2.py
  python benchmarks/eval_beside_lm_eval.py --lm-eval .cache/lm-eval/bin/python

The bar is 2 times lm-eval's at the better of its batch sizes (1 is what it does unasked). Imports and the loading of
weights are told apart. The figures of both must be the same, or the comparison says nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".cache" / "smollm2-hf"
BAR = 2.0
TASKS = {"cloze": 16, "brackets": 24, "arithmetic": 16}
BATCHES = (1, 16)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lm-eval", metavar="PYTHON", help="an interpreter that has lm-eval")
    parser.add_argument("--model", default=str(FOLDER), metavar="FOLDER")
    parser.add_argument("--tasks", nargs="*", default=list(TASKS))
    parser.add_argument("--child", choices=["shoal", "lm-eval"], help=argparse.SUPPRESS)
    parser.add_argument("--batch", type=int, default=16, help=argparse.SUPPRESS)
    parser.add_argument("--at", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        said = (of_shoal if args.child == "shoal" else of_lm_eval)(args)
        print(json.dumps(said))
        return 0
    if not args.lm_eval:
        parser.error("name the interpreter that has lm-eval with --lm-eval")
    with tempfile.TemporaryDirectory() as folder:
        write_tasks(Path(folder), args.tasks)
        rows = [("shoal", 16, asked(sys.executable, "shoal", 16, args, folder))]
        rows += [(f"lm-eval, batch {b}", b, asked(args.lm_eval, "lm-eval", b, args, folder)) for b in BATCHES]
    return told(rows, args.tasks)


def write_tasks(folder: Path, names: list[str]) -> None:
    from shoal.evaluate.generated.catalogue import named, write

    for name in names:
        write(named(name, 0, TASKS[name]), folder)


def asked(python: str, child: str, batch: int, args: argparse.Namespace, folder: str) -> dict[str, Any]:
    command = [python, __file__, "--child", child, "--batch", str(batch), "--model", args.model, "--at", folder]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    environment |= {"HF_HOME": str(Path(folder) / "hf"), "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [*command, "--tasks", *args.tasks], env=environment, stdout=subprocess.PIPE, check=True, cwd=folder
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"{child}, batch {batch}: {json.dumps(found)}", file=sys.stderr)
    return found


def cpu_s() -> float:
    """Of this process and of the children that it has waited for."""
    own, theirs = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + theirs.ru_utime + theirs.ru_stime


def of_shoal(args: argparse.Namespace) -> dict[str, Any]:
    from shoal.evaluate.ask import Asking, evaluated
    from shoal.evaluate.model import Local
    from shoal.evaluate.task_file import load_task
    from shoal.generate.opened import Wanted, of_folder

    model = Local(of_folder(Path(args.model), Wanted("cpu", special=True)), args.batch)
    found: dict[str, Any] = {"begin_s": cpu_s()}
    for name in args.tasks:
        task, before, clock = load_task(Path(args.at) / f"{name}.yaml"), cpu_s(), time.monotonic()
        figures = evaluated(task, model, Path(args.at) / "answers", Asking())
        values = {f"{one.metric},{one.filter}": one.found.mean for one in figures}
        found[name] = {"cpu_s": cpu_s() - before, "wall_s": time.monotonic() - clock, "values": values}
    return found


def of_lm_eval(args: argparse.Namespace) -> dict[str, Any]:
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    model = HFLM(pretrained=args.model, dtype="float32", device="cpu", batch_size=args.batch)
    manager = TaskManager(include_path=args.at, include_defaults=False)
    found: dict[str, Any] = {"begin_s": cpu_s()}
    for name in args.tasks:
        before, clock = cpu_s(), time.monotonic()
        told = lm_eval.simple_evaluate(
            model=model, tasks=[name], task_manager=manager, bootstrap_iters=0, log_samples=False
        )
        values = {key: value for key, value in told["results"][name].items() if isinstance(value, float)}
        found[name] = {"cpu_s": cpu_s() - before, "wall_s": time.monotonic() - clock, "values": values}
    return found


def told(rows: list[tuple[str, int, dict[str, Any]]], names: list[str]) -> int:
    print(f"{'':<18}{'begin CPU s':>12}" + "".join(f"{name + ' items/CPU s':>26}" for name in names))
    for label, _, found in rows:
        rates = "".join(f"{TASKS[name] / found[name]['cpu_s']:>26.3f}" for name in names)
        print(f"{label:<18}{found['begin_s']:>12.1f}{rates}")
    met = True
    own = rows[0][2]
    for name in names:
        best = min(found[name]["cpu_s"] for _, _, found in rows[1:])
        ratio = best / own[name]["cpu_s"]
        theirs = [found[name]["values"] for _, _, found in rows[1:]]
        same = all(
            abs(one[key] - value) <= 1e-6 * abs(value) for one in theirs for key, value in own[name]["values"].items()
        )
        met &= ratio >= BAR and same
        print(
            f"{name}: {ratio:.2f} times lm-eval's better one (bar {BAR:g}); figures {'the same' if same else 'DIFFER'}"
        )
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())

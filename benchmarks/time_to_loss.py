"""How fast models learn from each rule of start values (`model.init`), beside torchtitan's or transformers' in one run.

    pip install --target FOLDER --no-deps torchtitan==0.2.2 torchdata tyro docstring_parser typeguard
    python benchmarks/time_to_loss.py --peers FOLDER [--out FILE]       one GPU, ten minutes or so for everything
    python benchmarks/time_to_loss.py --peers FOLDER --shapes 88m       the shape of the claim alone: half of it
    python benchmarks/time_to_loss.py --shapes tied,deep --inits auto,normal --optimizers adamw
    python benchmarks/time_to_loss.py --measured FILE [FILE …]          judge what earlier runs have written
    python benchmarks/time_to_loss.py --tiny                            a processor, to try the code: no claim

Python source of this machine, a byte-level BPE of 8,192 entries, the same windows in the same order for all; AdamW at
1e-3 with warm-up and cosine, or Muon; 88M parameters read 450 steps of 32,768 tokens, other shapes less (`demo` is the
model of `make demo` with its learning rates). Without `--peers` the peer is transformers' Llama. A row is a rule, its
loss on held-out text the mean over the seeds; `to normal's end` is the share of the tokens after which it was where
`normal` ended.

Bars, at 88m: `auto` ends within 1% of torchtitan's start values in torchtitan (AdamW), and below `normal` by at least
8% with AdamW and 1.5% with Muon. On every shape `auto` ends no higher than `normal`, and within 1% of the best rule.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from benchmarks.to_loss.jobs import write  # noqa: E402
from benchmarks.to_loss.text import prepared  # noqa: E402
from benchmarks.to_loss.trials import FULL, TINY, Job, Trial  # noqa: E402

from shoal.spec.model import Model  # noqa: E402
from shoal.spec.start_values import RULES, rule_of  # noqa: E402

CLAIM = "88m"
USUAL = ["normal", "torchtitan", "scaled", "zero", "auto"]
NEAR = 0.01  # of the peer, and of the best rule
BELOW = {"adamw": 0.08, "muon": 0.015}  # of normal, at the shape of the claim
Curve = dict[str, Any]  # what a system prints for a job
Ends = dict[tuple[str, str], float]  # (system, rule): held-out loss at the end


def main() -> int:
    args = _arguments()
    if args.measured:
        curves = [json.loads(line) for file in args.measured for line in file.read_text().splitlines()]
        return judge(curves)
    trials = {name: one for name, one in (TINY if args.tiny else FULL).items() if name in args.shapes}
    curves: list[Curve] = []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        data = _texts(trials.values(), args.cache or work)
        for system, jobs in _asked(trials, args):
            write(work / "jobs.json", trials, data, jobs)
            for curve in _run(system, work / "jobs.json", args.peers):
                curves.append(curve)
                if args.out:
                    with args.out.open("a") as out:
                        out.write(json.dumps(curve) + "\n")
    return judge(curves, claims=not args.tiny)


def _arguments() -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return [name for name in text.split(",") if name]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, help="the folder that torchtitan was installed to")
    parser.add_argument("--shapes", type=names, default=list(FULL), help=f"some of {','.join(FULL)}")
    parser.add_argument("--inits", type=names, default=USUAL, help=f"some of {','.join(RULES)},auto")
    parser.add_argument("--optimizers", type=names, default=["adamw", "muon"], help="where a shape has them")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--no-peer", action="store_true", help="Shoal alone")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--cache", type=Path, help="keep the prepared text there, and find it there")
    parser.add_argument("--out", type=Path, help="add each curve to this file, as a line of JSON")
    parser.add_argument("--measured", type=Path, nargs="+", help="do not run: take what --out wrote")
    args = parser.parse_args()
    unknown = [n for n in args.shapes if n not in FULL] + [n for n in args.inits if n not in (*RULES, "auto")]
    if unknown:
        parser.error(f"there is no {', '.join(unknown)}")
    if not args.tiny and not args.measured and not _gpu():
        print("no GPU here: the tiny models, to try the code", file=sys.stderr)
        args.tiny = True
    if args.tiny and args.seeds == parser.get_default("seeds"):
        args.seeds = 1
    return args


def _asked(trials: Mapping[str, Trial], args: argparse.Namespace) -> list[tuple[str, list[Job]]]:
    """Jobs of each system."""
    ours = []
    for name, trial in trials.items():
        # `auto` is one of the rules by another name: what it takes is learned once.
        for optimizer in (o for o in trial.optimizers if o in args.optimizers):
            inits = dict.fromkeys(_named(trial, init, optimizer) for init in args.inits)
            ours += [Job(name, i, optimizer, s) for i, s in product(inits, range(args.seeds))]
    peer = "torchtitan" if args.peers else "transformers"
    begins = "its own" if args.peers else "its own (0.02)"
    theirs = [Job(CLAIM, begins, "adamw", seed) for seed in range(args.seeds)]
    wanted = CLAIM in trials and "adamw" in args.optimizers and not args.no_peer
    if wanted and not args.peers and importlib.util.find_spec("transformers") is None:
        print("neither torchtitan (--peers) nor transformers is here: Shoal alone", file=sys.stderr)
        wanted = False
    return [(peer, theirs), ("shoal", ours)] if wanted else [("shoal", ours)]


def _named(trial: Trial, init: str, optimizer: str) -> str:
    return rule_of(Model.model_validate({**trial.model, "init": init}), optimizer)[0]


def _texts(trials: Iterable[Trial], folder: Path) -> dict[str, Path]:
    """One text for all that have a vocabulary in common, as long as the longest wants it."""
    longest: dict[int, int] = {}
    trials = list(trials)
    for trial in trials:
        longest[trial.vocab] = max(longest.get(trial.vocab, 0), trial.tokens)
    return {trial.name: prepared(folder, longest[trial.vocab], trial.vocab) for trial in trials}


def _run(system: str, jobs: Path, peers: Path | None) -> Iterable[Curve]:
    module = ["benchmarks.to_loss.run_shoal"] if system == "shoal" else ["benchmarks.to_loss.run_peer", system]
    path = os.pathsep.join(str(p) for p in (HERE.parent, peers and peers.resolve(), os.environ.get("PYTHONPATH")) if p)
    command = [sys.executable, "-m", *module, str(jobs)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith("{"):
                yield json.loads(line)
    if child.returncode:
        print(f"{system}: ended with code {child.returncode}", flush=True)


def judge(curves: Sequence[Curve], claims: bool = True) -> int:
    ok = True
    for trial, optimizer in dict.fromkeys((c["trial"], c["optimizer"]) for c in curves):
        group = [c for c in curves if (c["trial"], c["optimizer"]) == (trial, optimizer)]
        ends = _table(trial, optimizer, group)
        auto = _named(FULL[trial], "auto", optimizer)
        if not claims:
            print(f"auto is {auto}; a toy, so nothing is claimed")
            continue
        for good, said in _verdicts(trial, optimizer, ends, auto):
            ok &= good
            print(f"{'PASS' if good else 'MISS'}  {said}")
    return int(not ok)


def _table(trial: str, optimizer: str, curves: Sequence[Curve]) -> Ends:
    rows: dict[tuple[str, str], list[Curve]] = {}
    for curve in curves:
        rows.setdefault((curve["system"], curve["init"]), []).append(curve)
    ends = {row: mean(c["points"][-1][1] for c in group) for row, group in rows.items()}
    normal = ends.get(("shoal", "normal"))
    print(f"\n{trial}, {optimizer}: {curves[0]['points'][-1][0] / 1e6:.1f} million tokens")
    head = f"{'system':<13} {'start values':<15} {'held-out':>8} {'of normal':>10} {'to normal’s end':>16}"
    print(f"{head} {'ms/step':>8}  seeds")
    for (system, init), group in sorted(rows.items(), key=lambda item: ends[item[0]]):
        end = ends[system, init]
        than = "" if normal is None else f"{end / normal - 1:+.1%}"
        share = "" if normal is None else _reached(group, normal)
        seeds = ", ".join(f"{c['points'][-1][1]:.4f}" for c in sorted(group, key=lambda c: c["seed"]))
        ms = min(c["ms"] for c in group)
        print(f"{system:<13} {init:<15} {end:>8.4f} {than:>10} {share:>16} {ms:>8.1f}  {seeds}")
    return ends


def _reached(curves: Sequence[Curve], level: float) -> str:
    """The share of the tokens after which the mean curve was at `level`, between two looks as on a straight line."""
    before: tuple[float, float] | None = None
    total = curves[0]["points"][-1][0]
    for at in zip(*(c["points"] for c in curves), strict=True):
        tokens, loss = at[0][0], mean(point[1] for point in at)
        if loss <= level:
            if before is not None and before[1] > loss:
                tokens = before[0] + (tokens - before[0]) * (before[1] - level) / (before[1] - loss)
            return f"{tokens / total:.0%}"
        before = tokens, loss
    return "not reached"


def _verdicts(trial: str, optimizer: str, ends: Ends, auto: str) -> Iterable[tuple[bool, str]]:
    ours = ends.get(("shoal", auto))
    if ours is None:
        return
    what = f"{trial}, {optimizer}: auto ({auto}) {ours:.4f}"
    normal, peer = ends.get(("shoal", "normal")), ends.get(("torchtitan", "its own"))
    if peer is not None:
        yield ours <= peer * (1 + NEAR), f"{what}, {ours / peer - 1:+.2%} of torchtitan's {peer:.4f} (bar {NEAR:+.0%})"
    if normal is not None and auto != "normal":
        bar = BELOW[optimizer] if trial == CLAIM else 0.0
        yield ours <= normal * (1 - bar), f"{what}, {ours / normal - 1:+.2%} of normal's {normal:.4f} (bar {-bar:+.1%})"
    rules = {init: end for (system, init), end in ends.items() if system == "shoal"}
    best = min(rules, key=lambda init: rules[init])
    if len(rules) > 1:
        said = f"{what}, {ours / rules[best] - 1:+.2%} of the best rule's, {best} (bar {NEAR:+.0%})"
        yield ours <= rules[best] * (1 + NEAR), said


def _gpu() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    sys.exit(main())

"""Runs a script under the supervisor, with the probe, in several ways, and compares the losses to the bit.

Twice; killed in the step after a save and resumed in the script's own way; and on two processes. Each way runs in its
own copy of the folder that the command was given in. What was found by reading is then confirmed or refuted.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.adopt.doctor import Report
from shoal.adopt.measured import Measured, Row
from shoal.adopt.verdicts import judged
from shoal.drill.live import Live, Silent
from shoal.errors import SetupError, TransientError, UsageError
from shoal.held_signals import stoppable
from shoal.journal.rundir import RunDir
from shoal.script.probe import MEASURED
from shoal.script.shadow import shadow

QUIET = ("track.mlflow=false", "guard.backoff_s=0.01")
REPEATED, RESUMED, SPREAD = "repeated", "resumed", "two processes"


@dataclass(frozen=True)
class Ran:
    """One run: its losses by step, and how it ended."""

    losses: Mapping[int, float]
    resumed_from: int | None = None  # the step of the checkpoint
    words: str = ""  # why it failed; empty where it did not
    cause: str = ""

    @property
    def last(self) -> int:
        return max(self.losses, default=0)


@dataclass(frozen=True)
class Asked:
    script: Path
    args: list[str]
    steps: int
    patience_s: float
    resume: str | None
    checkpoints: str | None


def measure(report: Report, args: argparse.Namespace) -> tuple[Report, Measured]:
    asked = Asked(Path(args.script), args.after, args.steps, args.patience, args.resume, args.checkpoints)
    if asked.resume is not None:
        try:
            shlex.split(asked.resume)
        except ValueError as e:
            raise UsageError(f"--resume '{asked.resume}' is no list of words ({e}); mend its quotes.") from None
    with stoppable(), tempfile.TemporaryDirectory(prefix="shoal-adopt-", ignore_cleanup_errors=True) as folder:
        first = _run(asked, Path(folder), "first")
        if not first.losses:
            why = first.words or "no step of an optimizer was seen"
            raise (TransientError if first.words else SetupError)(f"the script cannot be measured: {why}")
        measured = Measured([_repeated(first, _run(asked, Path(folder), "again"))])
        measured.rows.append(_resumed(asked, Path(folder), first))
        measured.rows.append(_spread(asked, Path(folder), first))
    return judged(report, measured), measured


def _run(asked: Asked, place: Path, name: str, options: tuple[str, ...] = (), kill: bool = False) -> Ran:
    """In real processes, which are gone afterwards."""
    print(f"adopt: {name}", file=sys.stderr, flush=True)
    here, folder = Path.cwd(), place / name / "here"
    shadow(here, folder)
    script = asked.script.resolve()
    if script.is_relative_to(here):
        script = folder / script.relative_to(here)
    words = ["run", "--workspace", str(place / name), "--name", name, *options, *QUIET, f"script.folder={folder}"]
    words += [f"guard.restarts={int(kill)}", "--", str(script), *asked.args]
    live = Live(
        RunDir.of(name, place / name), words, {MEASURED: "kill" if kill else "steps"}, asked.patience_s, follow=False
    )
    try:
        live.wait(lambda: _seen(live, kill).last >= asked.steps)
    except Silent as e:
        return replace(_seen(live, kill), words=str(e), cause="hang")
    finally:
        live.end()
    ran, failure = _seen(live, kill), next(iter(reversed(live.of("failure"))), None)
    if ran.last >= asked.steps or live.code == 0 or failure is None:
        return ran
    return replace(ran, words=str(failure.get("evidence") or failure.get("cause")), cause=str(failure.get("cause")))


def _seen(live: Live, killed: bool) -> Ran:
    """What the journal says up to now. Of a run that was killed: since it goes on. Where nobody saw at which step the
    checkpoint was that it goes on from (it was renamed after the save), it was the last save of before."""
    starts = live.of("start")
    newest = starts[-1] if len(starts) > 1 else None
    if killed and newest is None:
        return Ran({})
    attempt = 0 if newest is None else newest["attempt"]
    came = None if newest is None else newest.get("resumed_from")
    shift = 0
    if newest is not None and came is None and newest.get("path"):
        saves = [int(r["step"]) for r in live.of("checkpoint") if r.get("attempt") != attempt]
        came = shift = saves[-1] if saves else 0
    # A loss that nobody could read is NaN, and is not compared.
    steps = [r for r in live.of("step") if r.get("attempt") == attempt and r["loss"] == r["loss"]]
    return Ran({int(r["step"]) + shift: float(r["loss"]) for r in steps}, came if isinstance(came, int) else None)


def _repeated(first: Ran, again: Ran) -> Row:
    if again.words:
        return Row(REPEATED, None, f"the second run failed: {again.words}")
    return _compared(REPEATED, first, again, 1, "two runs with the same arguments")


def _compared(name: str, first: Ran, other: Ran, begin: int, what: str) -> Row:
    common = [step for step in sorted(first.losses.keys() & other.losses.keys()) if step >= begin]
    if not common:
        return Row(name, None, f"{what}: no step with a loss is in both")
    differ = [step for step in common if first.losses[step] != other.losses[step]]
    if not differ:
        return Row(name, True, f"{what} give the same losses to the bit ({len(common)} steps)")
    at = differ[0]
    return Row(
        name,
        False,
        f"{what} differ from step {at} on ({first.losses[at]:.6g} and {other.losses[at]:.6g})",
        at - common[0],
    )


def _resumed(asked: Asked, place: Path, first: Ran) -> Row:
    if asked.resume is None and asked.checkpoints is None and not _attaches(asked.script):
        return Row(RESUMED, None, "not measured: say how it goes on, --resume '--ckpt {checkpoint}'")
    options = [*(("--resume", asked.resume) if asked.resume else ())]
    options += ["--checkpoints", asked.checkpoints] if asked.checkpoints else []
    ran = _run(asked, place, "killed", tuple(options), kill=True)
    if ran.words:
        return Row(RESUMED, False, f"it was killed, and could not go on: {ran.words}", 0)
    if not ran.resumed_from:
        return Row(
            RESUMED, None, f"not measured: nothing was saved and gone on from within {asked.steps} steps (--steps)"
        )
    what = f"killed after a save, resumed from step {ran.resumed_from}: the run and one that nobody killed"
    return _compared(RESUMED, first, ran, ran.resumed_from + 1, what)


def _attaches(script: Path) -> bool:
    return "attach" in script.read_text(encoding="utf-8", errors="replace")


def _spread(asked: Asked, place: Path, first: Ran) -> Row:
    ran = _run(asked, place, "two", ("--processes", "2"))
    if ran.words:
        return Row(SPREAD, False, f"it fails on two processes: {ran.words}", 0 if ran.cause != "hang" else -1)
    common = sorted(first.losses.keys() & ran.losses.keys())
    if not common:
        return Row(SPREAD, None, "not measured: no step was seen")
    if all(first.losses[step] == ran.losses[step] for step in common):
        return Row(SPREAD, True, "rank 0 has the losses of a process alone, to the bit: nothing is shared out")
    one, two = (sum(run.losses[step] for step in common) / len(common) for run in (first, ran))
    return Row(SPREAD, None, f"it runs; the mean loss of {len(common)} steps is {two:.6g}, alone it is {one:.6g}")

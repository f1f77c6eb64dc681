"""At the end of a start: is there another, when, and without which nodes? The batch script runs it and obeys.

`python -m shoal.launch.slurm.verdict` prints one line, `requeue SECONDS NODES` or `leave CODE`, and says why on
stderr. Slurm may be counting the seconds until it kills the script, so little is imported.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.errors import DONE, TOLD_TO_STOP, TRANSIENT, WRONG_ENVIRONMENT, WRONG_USAGE
from shoal.journal.reading import told
from shoal.journal.rundir import RunDir
from shoal.launch.slurm import notes
from shoal.launch.slurm.notes import Notes

NEVER_AGAIN = (WRONG_USAGE, WRONG_ENVIRONMENT)
# Slurm itself waits for two minutes. A node that is given the job again within the second in which it was told to end
# it refuses it (`Job credential revoked`), and the job is lost; clocks of nodes differ by a little more than that.
AT_ONCE_S = 5.0
LATE_S = (
    45.0  # where Slurm is ending the job already (KillWait, 30 s as a rule): a time that passes meanwhile is forgotten
)
MOST_BAD_ALONE = 3  # a job of one node that finds so many bad is wrong itself


@dataclass(frozen=True)
class View:
    """What Slurm says of the job while its script still runs."""

    state: str
    reason: str
    requeue: bool

    @classmethod
    def of(cls, text: str) -> View:
        """Of `scontrol show job --oneliner`; one that does not answer leaves it to the exit code."""
        fields = dict(re.findall(r"(\w+)=(\S*)", text))
        return cls(fields.get("JobState", "RUNNING"), fields.get("Reason", "None"), fields.get("Requeue") != "0")

    @property
    def time_is_up(self) -> bool:
        return self.reason == "TimeLimit"

    @property
    def taken(self) -> bool:
        """Somebody has decided already: a person cancelled it, or Slurm is requeueing it (preemption, a lost node)."""
        return self.state != "RUNNING" and not self.time_is_up


@dataclass(frozen=True)
class Rules:
    requeues: int  # in a row without progress
    backoff_s: float  # before the first of them; doubled each time
    longest_s: float

    def wait_s(self, used: int) -> float:
        return min(self.backoff_s * 2**used, self.longest_s)


@dataclass(frozen=True)
class Start:
    """What just ended."""

    code: int
    nodes: tuple[str, ...]
    bad: dict[str, str]  # nodes that failed the check before it, and why; then no agent was started


@dataclass(frozen=True)
class Verdict:
    notes: Notes
    wait_s: float | None  # until the next start; None: there is none
    code: int

    def line(self, excluded: str | None) -> str:
        if self.wait_s is None:
            return f"leave {self.code}"
        without = ",".join([*([excluded] if excluded else []), *self.notes.excluded])
        return f"requeue {self.wait_s:.0f} {without}".rstrip()


def judge(start: Start, view: View, before: Notes, step: int, rules: Rules) -> Verdict:
    code = start.code
    progressed = step > before.furthest
    used = 0 if progressed else before.in_a_row
    after = replace(before, furthest=max(step, before.furthest), in_a_row=used, code=code, over=True)

    def end(why: str, code: int = code) -> Verdict:
        return Verdict(replace(after, code=code, why=why), None, code)

    if start.bad:
        after = replace(after, excluded={**before.excluded, **start.bad})
        listed = "; ".join(f"{node}: {why}" for node, why in sorted(start.bad.items()))
        alone = len(start.nodes) == 1 and len(after.excluded) < MOST_BAD_ALONE
        if len(start.bad) == len(start.nodes) and not alone:
            return end(f"every node that it was given failed the check before the start ({listed})", WRONG_ENVIRONMENT)
        code = TRANSIENT
    if code == DONE:
        return end("it is done")
    if not view.requeue:
        return end("it was told to stop" if code == TOLD_TO_STOP else f"it ended with code {code} and was told to stop")
    if view.taken:  # whatever that was, Slurm says it better; if it is a requeue the job is not over
        return Verdict(replace(after, over=False, why=f"Slurm ended this start (code {code})"), None, code)
    if code in NEVER_AGAIN:
        what = "the run file is wrong" if code == WRONG_USAGE else "its data or environment is wrong"
        return end(f"{what} (code {code}), which another start cannot cure")
    if used >= rules.requeues:
        budget = f"launch.requeues {rules.requeues}"
        return end(f"{used} starts in a row made no progress ({budget}); the last left with {code}")
    after = replace(after, in_a_row=used + 1, over=False)
    if start.bad:
        return Verdict(replace(after, why=f"started again without bad nodes ({listed})"), AT_ONCE_S, code)
    if code == TOLD_TO_STOP:
        why = "its time limit was near or reached" if view.time_is_up else "it was told to make room and has saved"
        return Verdict(replace(after, why=why), AT_ONCE_S if view.state == "RUNNING" else LATE_S, code)
    why = f"it left with code {code}; start {used + 1} of {rules.requeues} in a row"
    return Verdict(replace(after, why=why), rules.wait_s(used), code)


def bad_nodes(nodes: tuple[str, ...], answers: str | None) -> dict[str, str]:
    """From the lines `ok NODE` and `bad NODE WHY`. Who said nothing is bad too, unless nobody said anything: then it
    was the question that failed."""
    said: dict[str, str | None] = {}
    for line in (answers or "").splitlines():
        kind, _, rest = line.partition(" ")
        node, _, why = rest.partition(" ")
        if kind in ("ok", "bad") and node in nodes:
            said[node] = None if kind == "ok" else (why or "Python did not start")
    found = {node: said.get(node, "it did not answer") for node in nodes}
    return {node: why for node, why in found.items() if why is not None} if said else {}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m shoal.launch.slurm.verdict", description=__doc__)
    parser.add_argument("--run", required=True)
    parser.add_argument("--workspace", type=Path, required=True)
    parser.add_argument("--job", required=True)
    parser.add_argument("--code", type=int, required=True)
    parser.add_argument("--requeues", type=int, required=True, metavar="N", help="in a row without progress")
    parser.add_argument("--backoff-s", type=float, nargs=2, required=True, metavar=("FIRST", "LONGEST"))
    parser.add_argument("--nodes", required=True, help="of this start, separated by white space")
    parser.add_argument("--view", required=True, help="what scontrol shows of the job")
    parser.add_argument("--answers", help="of the check before the start, if it failed")
    parser.add_argument("--exclude", help="nodes that the run file excludes")
    args = parser.parse_args(argv)
    path = notes.file_of(args.workspace, args.job)
    before = notes.read(path) or Notes()
    nodes = tuple(args.nodes.split())
    start = Start(args.code, nodes, bad_nodes(nodes, args.answers))
    step = _furthest(args.workspace, args.run, before.furthest)
    verdict = judge(start, View.of(args.view), before, step, Rules(args.requeues, *args.backoff_s))
    try:
        notes.write(path, replace(verdict.notes, time=time.time()))
    except OSError as e:  # a full disk must not keep the job from another start
        print(f"shoal: cannot write {path} ({e.strerror}).", file=sys.stderr)
    again = (
        "it is over" if verdict.notes.over else "Slurm goes on with it" if verdict.wait_s is None else "started again"
    )
    when = f" in {verdict.wait_s:.0f} s" if verdict.wait_s else ""
    print(f"shoal: job {args.job}: {again}{when}: {verdict.notes.why}.", file=sys.stderr)
    print(verdict.line(args.exclude))
    return 0


def _furthest(workspace: Path, run: str, otherwise: int) -> int:
    run_dir = RunDir.of(run, workspace)
    path = run_dir.journal_file
    try:
        if run_dir.is_batch:  # the units that are over
            from shoal.observe.batch import tally_of

            tally = tally_of(run_dir)
            return otherwise if tally is None else tally.done + tally.failed
        steps = told(path).column("step")
        return int(steps.max()) if steps.size else otherwise
    except (OSError, ValueError, KeyError):  # none yet, or it cannot be read now
        return otherwise


if __name__ == "__main__":
    sys.exit(main())

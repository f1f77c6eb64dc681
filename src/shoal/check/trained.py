"""One way of training a run, done as `shoal train` does it, in real processes, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shoal import values
from shoal.check.jobs import Job
from shoal.drill.live import Live
from shoal.errors import DONE, TOLD_TO_STOP
from shoal.journal.journal import Record
from shoal.journal.rundir import RunDir
from shoal.plain_file import read_object
from shoal.spec import dump

MOST_BYTES, MOST_NAMES = 64 << 20, 1_000_000


@dataclass(frozen=True)
class Learning:
    """What a worker wrote down (`shoal.train.checked`)."""

    moved: dict[str, float]  # each parameter: the norm of its change
    frozen: list[str]
    without: list[str]  # a gradient
    same: list[str]  # with a gradient, and unchanged
    draws: bool  # random numbers

    @classmethod
    def read(cls, path: Path) -> Learning | None:
        try:
            said = read_object(path, MOST_BYTES, MOST_NAMES)
        except OSError:
            return None
        names = values.each(values.short, MOST_NAMES)
        return values.made(
            cls,
            said,
            moved=values.by_name(values.real, MOST_NAMES),
            frozen=names,
            without=names,
            same=names,
            draws=values.flag,
        )


@dataclass(frozen=True)
class Trained:
    losses: dict[int, float] = field(default_factory=dict)  # by step
    norms: dict[int, float] = field(default_factory=dict)
    digest: str | None = None  # of its last weights; None where it did not get there
    resumed_from: int = 0
    learning: Learning | None = None  # where it was asked for
    code: int = DONE
    words: str = ""  # why, where it failed

    @property
    def done(self) -> bool:
        return self.digest is not None

    @classmethod
    def of(cls, records: Sequence[Record], learning: Path, code: int = DONE, words: str = "") -> Trained:
        steps = [r for r in records if r["kind"] == "step"]
        return cls(
            {int(r["step"]): float(r["loss"]) for r in steps},
            {int(r["step"]): float(r["grad_norm"]) for r in steps},
            next((str(r["digest"]) for r in records if r["kind"] == "finished"), None),
            max((int(r.get("resumed_from") or 0) for r in records if r["kind"] == "start"), default=0),
            Learning.read(learning),
            code,
            _evidence(records) or words,
        )


def _evidence(records: Sequence[Record]) -> str:
    """Of its last failure, as the supervisor has it of the process that failed."""
    return next((str(r.get("evidence") or "") for r in reversed(records) if r["kind"] == "failure"), "")


def environment(job: Job, folder: Path) -> dict[str, str]:
    """For its workers (`shoal.train.checked`)."""
    asked = [f"stop={job.stop_after}"] * (job.stop_after is not None)
    asked += [f"learns={learning(job, folder)}"] * (job.stop_after is None)
    return {"SHOAL_CHECK": ";".join(asked)}


def learning(job: Job, folder: Path) -> Path:
    return folder / f"{job.name}.learning.json"


def train(job: Job, folder: Path, patience_s: float) -> Trained:
    """In real processes, which are gone afterwards."""
    file = folder / f"{job.name}.yaml"
    file.write_text(dump(job.run))
    args = ["train", str(file), "--workspace", str(folder)]
    live = Live(RunDir.of(job.name, folder), args, environment(job, folder), patience_s, follow=False)
    try:
        live.wait(live.over)
        if live.code == TOLD_TO_STOP and job.stop_after is not None:
            live.resume()
            live.wait(live.over)
        code = live.code or DONE
        return Trained.of(live.records, learning(job, folder), code, live.last_words() if code else "")
    finally:
        live.end()

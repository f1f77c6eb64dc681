"""A drill of somebody's script: the same means, and a verdict by what a script shows: its losses and its files.

Both runs are in copies of the folder that the script runs in, so that neither finds what the other has saved.
"""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shoal import readable
from shoal.decide.script import decide_script
from shoal.drill import means
from shoal.drill.account import Account
from shoal.drill.drill import BROKEN, CALM, Asked, broken
from shoal.drill.live import Live
from shoal.drill.means import Stage
from shoal.drill.measure import Measured, measure
from shoal.drill.plan import plan_of
from shoal.drill.table import rows_of
from shoal.errors import DONE, TransientError, UsageError
from shoal.journal.journal import Record
from shoal.journal.rundir import RunDir
from shoal.script.shadow import shadow
from shoal.spec.run import Run

KINDS = ("kill", "stop", "preempt", "coordinator")
_ALONE = ("track.mlflow=false", "track.wandb=off", "track.tensorboard=false")
_MOST_FILES = 10_000
_ENOUGH = 1 << 40  # steps, where nobody has counted them yet


@dataclass(frozen=True)
class Files:
    compared: int
    others: list[str]  # of which the bytes differ, or that one run alone has
    same_tensors: list[str]  # … of these: archives of torch that hold the same tensors, told in other words


@dataclass
class Result:
    steps: int
    planned: int
    ended: bool
    how: str
    faults: list[Measured] = field(default_factory=list)
    other_from: int | None = None  # the first step whose loss is another one
    compared: int = 0  # steps that have a loss in both
    files: Files | None = None  # that script.checkpoints names
    account: Account | None = None

    @property
    def passed(self) -> bool:
        """Whether it got to its end. Whether the curve is the same is the script's own doing, and is said."""
        return self.ended and len(self.faults) == self.planned

    def as_json(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "ended": self.ended,
            "how": self.how,
            "steps": self.steps,
            "planned": self.planned,
            "faults": [fault.as_json() for fault in self.faults],
            "lost_steps": sum(fault.lost_steps for fault in self.faults),
            "losses_compared": self.compared,
            "losses_differ_from": self.other_from,
            "files": asdict(self.files) if self.files else None,
            "ledger": self.account.as_json() if self.account else None,
        }


def refuse(scenario: str, count: int | None, run: Run, baseline: bool, pace_s: float) -> None:
    """What needs steps of Shoal's own, before anything is started."""
    kinds = [kind.strip() for kind in scenario.split(",")]
    if wrong := next((kind for kind in kinds if kind in means.MEANS and kind not in KINDS), None):
        raise UsageError(
            f"{wrong} does not apply to a script: it is done inside of Shoal's own step or checkpoints; take "
            f"{', '.join(KINDS)}."
        )
    plan_of(scenario, KINDS, lambda kind: None, _ENOUGH, count, 0, "the script")  # its names are known
    if pace_s:
        raise UsageError("--pace makes Shoal's own steps longer, and a script takes its own; leave it out.")
    if baseline:
        raise UsageError(
            "--baseline is for Shoal's own training: a script is run in a copy of its folder; leave it out."
        )
    if run.script is not None and not run.script.probe:
        raise UsageError(
            "script.probe is false, and without the probe nobody sees steps to break it at; set it to true."
        )


def drill(asked: Asked, scenario: str, count: int | None, seed: int, folder: Path) -> Result:
    closed = decide_script(asked.run).run
    calm = _begin(asked, closed, folder, CALM)
    try:
        calm.say("first the run that nobody breaks")
        calm.wait(calm.over)
        if calm.code != DONE:
            raise TransientError(f"the script fails without any fault (exit code {calm.code}): {calm.last_words()}")
    finally:
        calm.end()
    steps = calm.step
    if not steps:
        raise UsageError(
            "the probe saw no step in the script (docs/guide/scripts.md says what it sees), so none is broken."
        )
    planned = plan_of(scenario, KINDS, lambda kind: None, steps, count, seed, "the script")
    live = _begin(asked, closed, folder, BROKEN)
    faults, how = broken(planned, Stage(live, folder, folder, asked.pause_s), live, asked.patience_s)
    ended = not how and live.code == DONE
    if ended and len(faults) < len(planned):
        how = f"{len(planned) - len(faults)} of {len(planned)} faults came too late: a longer run leaves room for them"
    first, compared = _losses(calm.records, live.records)
    return Result(
        steps,
        len(planned),
        ended,
        how or ("" if ended else f"exit code {live.code}: {live.last_words()}"),
        measure(faults, live.records, calm.records),
        first,
        compared,
        _files(closed, folder),
        Account.of(live.records, live.wall_s) if live.records else None,
    )


def _begin(asked: Asked, run: Run, folder: Path, name: str) -> Live:
    assert run.script is not None
    assert run.script.folder is not None
    script, here = run.script, Path(run.script.folder)
    place = folder / f"{name}-folder"
    shadow(here, place)
    inside = Path(script.path).is_relative_to(here)
    path = place / Path(script.path).relative_to(here) if inside else Path(script.path)
    values = [*asked.overrides, *_ALONE, f"name={name}", f"script.folder={place}", f"script.path={path}"]
    args = ["run", "--workspace", str(folder), *values, asked.file]
    return Live(RunDir.of(name, folder), args, {}, asked.patience_s, asked.tick)


def _losses(calm: Sequence[Record], broken: Sequence[Record]) -> tuple[int | None, int]:
    """By steps, those that were done last."""
    one, other = ({int(r["step"]): r["loss"] for r in records if _has_loss(r)} for records in (calm, broken))
    both = sorted(one.keys() & other.keys())
    return next((step for step in both if one[step] != other[step]), None), len(both)


def _has_loss(record: Record) -> bool:
    return record["kind"] == "step" and isinstance(record.get("loss"), float)


def _files(run: Run, folder: Path) -> Files | None:
    """What `script.checkpoints` names, in both folders; None where it names nothing."""
    if run.script is None or run.script.checkpoints is None or os.path.isabs(run.script.checkpoints):
        return None
    found = []
    for name in (CALM, BROKEN):
        place = folder / f"{name}-folder"
        digests: dict[str, str] = {}
        for path in sorted(place.glob(run.script.checkpoints)):
            for file in [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file()):
                if len(digests) < _MOST_FILES:
                    with open(file, "rb") as opened:
                        digests[str(file.relative_to(place))] = hashlib.file_digest(opened, "sha256").hexdigest()
        found.append(digests)
    names = sorted(found[0].keys() | found[1].keys())
    others = [name for name in names if found[0].get(name) != found[1].get(name)]
    one, other = (folder / f"{name}-folder" for name in (CALM, BROKEN))
    same = [name for name in others if (held := _tensors(one / name)) is not None and held == _tensors(other / name)]
    return Files(len(names), others, same)


def _tensors(file: Path) -> list[tuple[int, int]] | None:
    """Sizes and CRC-32 of the tensors in what torch.save wrote; the pickle beside them names them in an order that a
    resumed run need not have."""
    try:
        with zipfile.ZipFile(file) as archive:
            return sorted((i.file_size, i.CRC) for i in archive.infolist() if "/data/" in i.filename)
    except (OSError, zipfile.BadZipFile):
        return None


def as_text(result: Result) -> str:
    lines = [*rows_of(result.faults, samples=False), ""]
    if result.compared:
        same = "those of the run without faults" if result.other_from is None else (
            f"others than without faults from step {result.other_from} on"
        )  # fmt: skip
        lines.append(f"losses of {result.compared} steps: {same}")
    else:
        lines.append("losses: the probe saw none that both runs have")
    if result.files is not None:
        files, differ = result.files, [name for name in result.files.others if name not in result.files.same_tensors]
        said = "all with the same bytes" if not files.others else f"{len(files.others)} with other bytes"
        said += f", {len(files.same_tensors)} of them with the same tensors" * bool(files.same_tensors)
        said += f" ({', '.join(differ[:3])}{' …' * (len(differ) > 3)})" * bool(differ)
        lines.append(f"files of script.checkpoints: {files.compared}, {said}")
    if result.account is not None:
        account = result.account
        sums = f"{account.parts_s + account.between_s:.2f} s of {account.wall_s:.2f} s"
        lines.append(f"ledger sums to {sums}, {readable.percent(account.off, 1)} off")
    again = sum(fault.resumed for fault in result.faults)
    started = f" (started again {again} time{'s' * (again > 1)}, as a scheduler would)" if again else ""
    if result.passed:
        lines.append(f"passed: the script came to its end{started}")
    else:
        wrong = [] if result.ended else ["the script did not come to its end"]
        lines.append(f"not passed: {'; '.join([*wrong, *([result.how] if result.how else [])])}")
    return "\n".join(lines)

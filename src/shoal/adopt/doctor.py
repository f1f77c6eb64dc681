"""Reads a script and its project, asks every rule, and says what was found and what a framework does in its place."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from shoal.adopt.finding import Finding, merged
from shoal.adopt.project import Project, read_project
from shoal.adopt.rules import dormant, places, ranks, saving, speed, steps
from shoal.adopt.training import HELPERS, Training
from shoal.errors import SpecError

Asked = Callable[[Training], Iterator[Finding]]
EVERYWHERE: tuple[Asked, ...] = (places.unsafe_load, places.absolute_path, places.fixed_world, dormant.dormant)
OF_A_LOOP: tuple[Asked, ...] = (
    ranks.one_rank_collective,
    ranks.sampler_epoch,
    ranks.ddp_sampler,
    steps.zero_grad,
    steps.accumulation,
    steps.train_mode,
    steps.optimizer_early,
    saving.checkpoints,
    saving.no_seed,
    saving.non_atomic_save,
    speed.host_sync,
    speed.loader_workers,
    speed.no_autocast,
)


@dataclass
class Report:
    training: Training
    script: str
    files: list[str]
    findings: list[Finding]
    notes: list[str] = field(default_factory=list)

    @property
    def defects(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.is_defect]


def examine(script: Path) -> Report:
    return judge(read_project(script))


def judge(project: Project) -> Report:
    try:
        training = Training(project)
        asked = [*EVERYWHERE, *(OF_A_LOOP if training.steps else ())]
        found = merged([finding for rule in asked for finding in rule(training)])
        notes = list(_notes(training))
    except RecursionError:
        script = project.script.shown
        raise SpecError(f"{script} is nested too deeply to be read; give a script that people have written.") from None
    files = [module.shown for module in project.modules.values()]
    return Report(training, project.script.shown, files, found, [*notes, *project.left_out])


# Functions of others by whose name a script may go on.
_GOES_ON = re.compile("attach$|resume|restore|load_(?:checkpoint|ckpt|state|snapshot)")


def _notes(t: Training) -> Iterator[str]:
    if t.owner is not None:
        yield f"{t.owner} has the loop: it saves, resumes, shares out data and scales losses, and is not judged"
        if t.owner == "Lightning" and not any(name.endswith("seed_everything") for name in t.used):
            yield "Lightning seeds nothing by itself: seed_everything(…) makes a run repeatable"
    elif not t.steps:
        what = "no step of an optimizer" if t.has_torch else "no PyTorch"
        yield f"{what} was found in it: only paths, devices and pickles were looked at"
    for kind in sorted(t.helpers):
        does = {
            "accelerator": "it moves, shares out data and divides losses",
            "fabric": "it moves and shares out data",
            "engine": "it steps, zeroes gradients, divides losses and saves",
            "booster": "it steps and saves",
        }[kind]
        yield f"{HELPERS[kind]} helps the loop: {does}, and that is not judged"
    done_elsewhere = t.owner or t.helpers or any(_GOES_ON.search(name.rpartition(".")[2]) for name in t.used)
    if t.steps and not t.loads and not t.shared_saves and not done_elsewhere:
        yield "it loads no checkpoint: a run that was killed begins anew (shoal.attach goes on)"

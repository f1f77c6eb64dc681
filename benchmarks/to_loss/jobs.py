"""What the script hands to a system's process: trials, where their text lies, and the jobs of each."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.to_loss.trials import Job, Trial


def write(file: Path, trials: Mapping[str, Trial], data: Mapping[str, Path], jobs: Sequence[Job]) -> None:
    told = [
        {"trial": asdict(trial), "data": str(data[name]), "jobs": [asdict(j) for j in jobs if j.trial == name]}
        for name, trial in trials.items()
    ]
    file.write_text(json.dumps([one for one in told if one["jobs"]]))


def read(file: Path) -> Iterator[tuple[Trial, Path, list[Job]]]:
    for one in json.loads(file.read_text()):
        yield Trial(**one["trial"]), Path(one["data"]), [Job(**job) for job in one["jobs"]]

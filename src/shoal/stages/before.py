"""States of stages as they were saved until November 2026: `step-N.safetensors`, in the folder of the peer itself.

They are read, so that a run of then goes on; what is saved now is a checkpoint (`shoal.stages.states`).
"""

from __future__ import annotations

import re
from pathlib import Path

from safetensors import SafetensorError, safe_open

from shoal.plain_file import read_plain
from shoal.values import BadValue, shown

_NAME = re.compile(r"step-(\d{8,18})\.safetensors")


def old_states(folder: Path) -> dict[int, Path]:
    """By their steps."""
    found = ((_NAME.fullmatch(file.name), file) for file in folder.glob("step-*.safetensors"))
    return {int(match[1]): file for match, file in found if match}


def read_old(file: Path, most_bytes: int) -> tuple[bytes, str | None]:
    """The state, as a sibling would hand it over, and the schedule that it was trained with, where it says so.
    `BadValue` for what is none."""
    try:
        data = read_plain(file, most_bytes)
        with safe_open(file, "pt") as f:
            return data, (f.metadata() or {}).get("schedule")
    except (OSError, SafetensorError) as e:
        raise BadValue(f"no state: {shown(str(e))}") from None

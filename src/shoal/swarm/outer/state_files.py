"""The outer state as two files: weights (safetensors) and what they are (JSON). Equal states make equal files."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from shoal.plain_file import read_object
from shoal.swarm.outer.outer import Outer
from shoal.swarm.outer.rule import Rule
from shoal.values import BadValue, shown, text, whole

WEIGHTS, ABOUT = "outer.safetensors", "outer.json"
FILES = (WEIGHTS, ABOUT)
VERSION = 1
MOST_ROUND = 1 << 40


class BadSnapshot(ValueError):
    """Not a state of this swarm, or not the one that was asked for."""


def save(outer: Outer, folder: Path, digest: str | None = None) -> str:
    """The digest. The second file is the last to appear, so that a folder which has it is whole."""
    digest = digest or outer.digest()
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {"theta": outer.theta}
    if outer.momentum is not None:
        tensors["momentum"] = outer.momentum
    about = {
        "version": VERSION,
        "round": outer.round,
        "count": outer.count,
        "digest": digest,
        "momentum": outer.momentum is not None,
    }
    save_file(tensors, folder / f"{WEIGHTS}.new")
    os.replace(folder / f"{WEIGHTS}.new", folder / WEIGHTS)
    (folder / f"{ABOUT}.new").write_text(json.dumps(about, sort_keys=True))
    os.replace(folder / f"{ABOUT}.new", folder / ABOUT)
    return digest


def load(folder: Path, rule: Rule, count: int, digest: str | None = None) -> Outer:
    """Checked: of `count` weights, all of them numbers, with the digest that it says and that is expected."""
    about = _about(folder)
    if about.count != count:
        raise BadSnapshot(f"{folder} has {about.count} weights and the model {count}: it is of another run.")
    try:
        tensors = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError, ValueError) as e:
        raise BadSnapshot(f"{folder / WEIGHTS} cannot be read: {shown(str(e))}.") from None
    named = {"theta", "momentum"} if rule.momentum else {"theta"}
    if set(tensors) != named or any(t.dtype != np.float32 or t.shape != (count,) for t in tensors.values()):
        raise BadSnapshot(f"{folder / WEIGHTS} does not hold {' and '.join(sorted(named))} of {count} float32 numbers.")
    for name, tensor in tensors.items():
        if not np.isfinite(tensor).all():
            raise BadSnapshot(f"{name} of {folder / WEIGHTS} holds what is not finite.")
    outer = Outer(tensors["theta"], rule, about.round, tensors.get("momentum"))
    found = outer.digest()
    if found != about.digest or (digest is not None and found != digest):
        raise BadSnapshot(
            f"{folder} has the digest {found[:16]}, and {shown((digest or about.digest)[:16])} was expected."
        )
    return outer


@dataclass(frozen=True)
class About:
    count: int
    round: int
    digest: str


def _about(folder: Path) -> About:
    try:
        about = read_object(folder / ABOUT)
        if (version := whole(about.get("version"))) != VERSION:
            raise BadSnapshot(f"{folder} is of version {version}, and this Shoal reads {VERSION}.")
        count, round = whole(about.get("count")), whole(about.get("round"), MOST_ROUND, -1)  # -1: before the first
        return About(count, round, text(about.get("digest"), 128))
    except (OSError, BadValue) as e:
        raise BadSnapshot(f"{folder / ABOUT} cannot be read: {e}.") from None

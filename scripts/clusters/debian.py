"""Programs that only the distribution has, in its own place, from its own packages."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from scripts.clusters import cache


class Missing(Exception):
    """This machine cannot have what is needed; says why."""


def get(what: str, packages: Sequence[str], programs: Sequence[str]) -> None:
    """Installs the packages unless all programs are there."""
    if all(map(shutil.which, programs)):
        return
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise Missing(f"{what} is not installed: apt-get install {' '.join(packages)} (as root)")
    apt = ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300"]
    asked = [*apt, "install", "-y", "--no-install-recommends", *packages]
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    cache.root().mkdir(parents=True, exist_ok=True)
    with open(cache.root() / f"{what.lower()}-install.log", "w") as log:
        for command in (asked, [*apt, "update"], asked):  # the lists may be old, or not there
            done = subprocess.run(command, env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
            if command is asked and done.returncode == 0:
                break
    if absent := [name for name in programs if not shutil.which(name)]:
        said = Path(log.name).read_text()[-500:]
        raise Missing(f"apt-get could not install {', '.join(packages)} ({', '.join(absent)} missing): {said}")

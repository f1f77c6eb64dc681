"""What the installed torch cannot do, refused before anything starts. Never imports torch: it asks the package."""

from __future__ import annotations

from importlib import metadata

from shoal.errors import SetupError

# The earliest version that a schedule was seen to work with. zbv runs the autograd nodes of a stage twice. In 2.11 a
# node of one's own has forgotten its inputs by then ("Attribute '_input_metadata' is invalid", three meshes of three);
# 2.12 was not tried.
SINCE = {"zbv": (2, 13)}


def installed() -> str:
    """Its version, such as 2.13.0+cu130; empty where it is not known."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:  # from source, without its metadata
        return ""


def impossible_schedules() -> tuple[str, ...]:
    have = _numbers(installed())
    return tuple(name for name, since in SINCE.items() if have and have < since)


def refuse_schedule(schedule: str) -> None:
    if schedule in impossible_schedules():
        since = ".".join(map(str, SINCE[schedule]))
        raise SetupError(
            f"mesh.schedule {schedule} needs torch {since} or later, and {installed()} is installed: install it, or "
            "take interleaved, which puts two stages on a process as well."
        )


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split("+")[0].split(".")[:2]
    return tuple(int(part) for part in parts) if all(part.isdecimal() for part in parts) else ()

"""One GPU as its driver tells it, and which of a machine's a process may use."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Vendor = Literal["nvidia", "amd"]
# The variables that choose among a vendor's GPUs, in the order in which they apply: what the first leaves, the second
# counts anew. (Of those in one row the first that is set.)
CHOOSERS: dict[Vendor, tuple[tuple[str, ...], ...]] = {
    "nvidia": (("CUDA_VISIBLE_DEVICES",),),
    "amd": (("ROCR_VISIBLE_DEVICES",), ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")),
}
LARGEST_ANSWER = 1 << 22  # of a driver's tool, in characters: 64 GPUs take some KB
LARGEST_MEMORY = 1 << 50
ASK_S = 20.0
_BUS = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])", re.IGNORECASE)


@dataclass(frozen=True)
class Gpu:
    vendor: Vendor
    name: str  # "NVIDIA H200", "AMD Instinct MI300X"
    memory_bytes: int | None = None  # None: its driver does not say
    bus: str | None = None  # 0000:19:00.0, as sysfs names it
    arch: str | None = None  # gfx942; AMD's alone
    uuid: str | None = None


class Unanswered(Exception):
    """A tool that is not there, failed or took too long; a sentence without its full stop."""


def ask(command: Sequence[str], limit_s: float = ASK_S) -> str:
    try:
        told = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=limit_s)
    except FileNotFoundError:
        raise Unanswered(f"{command[0]} is not there") from None
    except OSError as e:
        raise Unanswered(f"{command[0]} cannot be started ({e.strerror})") from None
    except subprocess.TimeoutExpired:
        raise Unanswered(f"{command[0]} did not list the GPUs within {limit_s:g} s") from None
    if told.returncode:
        last = (told.stdout + told.stderr).strip().splitlines()[-1:]
        raise Unanswered(f"{command[0]} failed ({' '.join(last) or told.returncode})")
    return told.stdout[:LARGEST_ANSWER]


def whole_in(text: str, most: int = LARGEST_MEMORY) -> int | None:
    """A number of bytes, MiB or whatever a tool counts in; None where it is none that a GPU could have."""
    plain = text.isascii() and text.isdecimal() and len(text) <= 20
    return int(text) if plain and int(text) <= most else None


def bus_id(text: str) -> str | None:
    """As sysfs writes it: `00000000:19:00.0` of nvidia-smi and `19:00.0` are 0000:19:00.0."""
    found = _BUS.fullmatch(text.strip())
    if found is None:
        return None
    domain, bus, device, function = found.groups()
    return f"{int(domain or '0', 16):04x}:{bus}:{device}.{function}".lower()


def allowed(found: Sequence[Gpu], environ: Mapping[str, str]) -> list[Gpu]:
    """Those that a process with that environment may use, in its own order. What cannot be told apart (a slice of a
    GPU, an id that no driver gave) still counts as one, as far as there are GPUs."""
    left = list(found)
    for names in CHOOSERS[found[0].vendor] if found else ():
        listed = next((environ[name] for name in names if name in environ), None)
        if listed is not None:
            left = _chosen(left, listed)
    return left


def _chosen(found: list[Gpu], listed: str) -> list[Gpu]:
    chosen: list[Gpu] = []
    for word in (part.strip() for part in listed.split(",")):
        if not word or word == "-1":
            break  # what follows is not looked at: CUDA's rule, and HIP's
        if word.isdecimal():
            if int(word) >= len(found):
                break
            chosen.append(found[int(word)])
        else:
            meant = next((gpu for gpu in found if gpu.uuid and gpu.uuid.lower().startswith(word.lower())), None)
            chosen.append(meant or found[min(len(chosen), len(found) - 1)] if found else Gpu("nvidia", word))
    return chosen[: len(found)]

"""Which entry a name means: published spellings, drivers' names, short ones; also fabrics in a publication's words.

Names are compared in atoms, runs of letters and runs of digits: "A10" is then not in "A100", and "RTX4090" is "rtx
4090".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from shoal.plan.hardware_types import Device, Fabric

Atoms = tuple[str, ...]
Spelling = tuple[Atoms, ...]  # words that must all be there, in any order

OWN_ENTRY = "in ten lines of hardware/NAME.toml (docs/guide/hardware.md)"

_MEMORY = re.compile(r"(?<![a-z0-9.])(\d+)\s*g(?:i?b)?\b")
_WATTS = re.compile(r"(?<![a-z0-9.])(\d{2,4})\s*w\b")
_COUNT = re.compile(r"^\s*\d+\s*[x×*]\s*")
_ATOM = re.compile(r"[a-z]+|\d+")
_ELSEWHERE = {"infiniband": "ib", "rocev2": "roce", "rdma": "roce", "eth": "ethernet", "gbe": "ethernet"}


@dataclass(frozen=True)
class Query:
    """A name in atoms, and what it says of memory and power."""

    atoms: Atoms
    memory_gb: int | None
    watts: int | None

    @staticmethod
    def of(name: str) -> Query:
        text = _COUNT.sub("", name.lower())
        memory, watts = _MEMORY.search(text), _WATTS.search(text)
        rest = _WATTS.sub(" ", _MEMORY.sub(" ", text))
        return Query(split(rest), int(memory[1]) if memory else None, int(watts[1]) if watts else None)

    def fit(self, device: Device, spellings: Sequence[Spelling]) -> float | None:
        """Letters and digits of the longest spelling that is in the name; more when memory and watts agree."""
        longest = max((_length(spelling, self.atoms) for spelling in spellings), default=0)
        if not longest:
            return None
        fit = float(longest)
        if self.memory_gb is not None:
            fit += 3 if abs(self.memory_gb - device.memory_gb) <= 0.03 * device.memory_gb else -0.5
        if self.watts is not None and device.watts is not None:
            fit += 1 if abs(self.watts - device.watts) <= 1 else -0.25
        return fit


def spellings(device: Device) -> tuple[Spelling, ...]:
    names = [_MEMORY.sub(" ", name.lower()) for name in (device.name, *device.aliases)]
    return tuple(tuple(filter(None, map(split, name.split()))) for name in names)


def split(text: str) -> Atoms:
    # "TPUv4" and "RTXA6000" are two words each.
    return tuple(_ATOM.findall(re.sub(r"(tpu|rtx)(?=[a-z])", r"\1 ", text.lower())))


def key(name: str) -> str:
    """Equal for spellings of one name that differ in case, spaces and dashes alone."""
    return "".join(split(name))


def fabric_key(name: str) -> str:
    return _ELSEWHERE.get(key(name), key(name))


def unknown(kind: str, name: str, known: Sequence[Device] | Sequence[Fabric]) -> str:
    by_spelling: dict[str, str] = {}
    for entry in known:
        for alias in (entry.name, *entry.aliases):
            by_spelling.setdefault(key(alias), entry.name)
    close = get_close_matches(key(name), by_spelling, n=6, cutoff=0.5)
    nearest = list(dict.fromkeys(by_spelling[spelling] for spelling in close))[:3]
    near = f"the nearest {'are' if len(nearest) > 1 else 'is'} {', '.join(nearest)}; " if nearest else ""
    if families := dict.fromkeys(entry.family for entry in known if isinstance(entry, Fabric) and entry.family):
        near = near or f"known are {', '.join(families)}; "
    return f"there is no {kind} '{name}' in the catalogue; {near}describe your own {OWN_ENTRY}."


def fabrics_in(text: str, known: Sequence[Fabric]) -> tuple[list[Fabric], list[str]]:
    """The fabrics that a publication names, and the families: ("HDR IB" is both)."""
    atoms = split(text)
    families = {_ELSEWHERE.get(atom, atom) for atom in atoms} | ({"roce"} if "rocev" in atoms else set())
    named = [f for f in known if any(_within(split(spelling), atoms) for spelling in (f.name, *f.aliases))]
    return named, [f.family for f in known if f.family in families]


def node_gbs_in(text: str) -> float | None:
    """GB/s of a node in words such as "8x400Gb" or "1600 Gbps/node"."""
    ports = re.search(r"(\d+)\s*[x×]\s*(\d+)\s*g(?:b|bit|bps|be)?\b", text, re.IGNORECASE)
    if ports:
        return int(ports[1]) * int(ports[2]) / 8
    whole = re.search(r"(\d+(?:\.\d+)?)\s*([gt])b(?:it|ps)?(?:/s)?\s*(?:/|per |a )\s*node", text, re.IGNORECASE)
    if whole:
        return float(whole[1]) * (1000 if whole[2].lower() == "t" else 1) / 8
    return None


def _length(spelling: Spelling, atoms: Atoms) -> int:
    if not spelling or not all(_within(word, atoms) for word in spelling):
        return 0
    return sum(len(atom) for word in spelling for atom in word)


def _within(part: Atoms, atoms: Atoms) -> bool:
    return any(atoms[i : i + len(part)] == part for i in range(len(atoms) - len(part) + 1))

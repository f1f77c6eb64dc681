"""What a checkpoint says about itself: `manifest.json`, and the checks that need nothing but it.

The format is docs/reference/checkpoint.md. In short: every tensor has a dtype, a global shape and slices; a slice says
which file holds it, where, which box of the tensor it is, and the xxh3-128 of its bytes. No torch here, no pickle.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from xxhash import xxh3_128_hexdigest

from shoal.checkpoint.names import RANK_FILE
from shoal.errors import CheckpointError

FORMAT, VERSION = "shoal-checkpoint", 1

# The names are safetensors'. What is not here is refused when saving, not guessed when loading.
ITEM_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
}

Dims = tuple[int, ...]


class Corrupt(CheckpointError):
    """This checkpoint is damaged or incomplete; an older one may be good."""


@dataclass(frozen=True)
class Slice:
    """A box of a tensor, contiguous in one file."""

    file: str
    key: str  # its name in the safetensors header
    offset: Dims  # where the box begins in the tensor
    shape: Dims
    at: int  # its first byte in the file, so that it is read without the header (and by a range request)
    xxh3_128: str


@dataclass(frozen=True)
class Entry:
    """One tensor, whole."""

    dtype: str
    shape: Dims
    slices: tuple[Slice, ...]

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class File:
    """One file. Its header and its slices cover every byte of it, so that no flipped bit is outside a checksum."""

    bytes: int
    header_bytes: int
    header_xxh3_128: str


@dataclass(frozen=True)
class Manifest:
    step: int
    term: int  # which start of the workers wrote it
    world: int  # ranks that wrote it; any other number may read it
    saved_at: float  # Unix time
    extra: dict[str, Any]
    files: dict[str, File]
    tensors: dict[str, Entry]


def encode(manifest: Manifest) -> bytes:
    """JSON, a line a tensor; its last member is the checksum of all bytes before the last comma."""
    fields = asdict(manifest)
    members = [f'{{"format":"{FORMAT}"', f'"version":{VERSION}']
    members += [f"{_json(key)}:{_json(fields[key])}" for key in ("step", "term", "world", "saved_at", "extra")]
    members += [f"{_json(key)}:{_lines(fields[key])}" for key in ("files", "tensors")]
    head = ",\n".join(members).encode()
    return head + seal(head)


def decode(data: bytes) -> Manifest:
    """The manifest, or `Corrupt` with the reason."""
    if not sealed(data):
        raise Corrupt("its manifest.json is damaged (its checksum does not match)")
    try:
        fields = json.loads(data)
        if fields["format"] != FORMAT:
            raise ValueError(f"its format is {fields['format']}")
        if fields["version"] > VERSION:
            raise CheckpointError(
                f"it is of format version {fields['version']}, from a newer Shoal: upgrade Shoal to read it"
            )
        manifest = Manifest(
            step=int(fields["step"]),
            term=int(fields["term"]),
            world=int(fields["world"]),
            saved_at=float(fields["saved_at"]),
            extra=dict(fields["extra"]),
            files={name: File(**file) for name, file in fields["files"].items()},
            tensors={name: entry_of(entry) for name, entry in fields["tensors"].items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise Corrupt(f"its manifest.json cannot be understood ({type(e).__name__}: {e})") from e
    check(manifest)
    return manifest


def entry_of(fields: dict[str, Any]) -> Entry:
    """An entry from its JSON."""
    slices = [Slice(**{**s, "offset": tuple(s["offset"]), "shape": tuple(s["shape"])}) for s in fields["slices"]]
    return Entry(fields["dtype"], tuple(fields["shape"]), tuple(slices))


def check(manifest: Manifest) -> None:
    """Every slice lies in a file that is listed, and the slices of a tensor cover it once: no hole, no overlap."""
    if foreign := [name for name in manifest.files if not RANK_FILE.fullmatch(name)]:
        raise Corrupt(f"its manifest.json names a file '{foreign[0]}' that is not one of a checkpoint")
    for name, entry in manifest.tensors.items():
        if entry.dtype not in ITEM_BYTES:
            raise Corrupt(f"tensor '{name}' has the unknown dtype {entry.dtype}")
        for s in entry.slices:
            file = manifest.files.get(s.file)
            if file is None or s.at < file.header_bytes or s.at + math.prod(s.shape) * entry.item_bytes > file.bytes:
                raise Corrupt(f"a slice of tensor '{name}' lies outside of its file {s.file}")
        if not tiles(entry.shape, [(s.offset, s.shape) for s in entry.slices]):
            raise Corrupt(f"the slices of tensor '{name}' do not cover it exactly once")


def tiles(shape: Dims, boxes: Sequence[tuple[Dims, Dims]]) -> bool:
    """Whether the boxes (offset, shape) cover the tensor exactly once."""
    if any(len(o) != len(shape) or len(s) != len(shape) for o, s in boxes):
        return False
    if any(o < 0 or n <= 0 or o + n > whole for box in boxes for o, n, whole in zip(*box, shape, strict=True)):
        return False
    if sum(math.prod(s) for _, s in boxes) != math.prod(shape):
        return False
    if len(boxes) < 2:
        return True
    if not shape:
        return False
    # Within bounds and with the right sum, only an overlap could hide a hole. Sweep along the dimension that is cut the
    # most: a thousand shards then have one neighbour each instead of a thousand.
    d = max(range(len(shape)), key=lambda i: len({o[i] for o, _ in boxes}))
    active: list[tuple[Dims, Dims]] = []
    for box in sorted(boxes, key=lambda b: b[0][d]):
        active = [a for a in active if a[0][d] + a[1][d] > box[0][d]]
        if any(intersect(*a, *box) for a in active):
            return False
        active.append(box)
    return True


def intersect(offset_a: Dims, shape_a: Dims, offset_b: Dims, shape_b: Dims) -> tuple[Dims, Dims] | None:
    """The box that two boxes share, or None."""
    low = tuple(max(a, b) for a, b in zip(offset_a, offset_b, strict=True))
    high = tuple(min(a + n, b + m) for a, n, b, m in zip(offset_a, shape_a, offset_b, shape_b, strict=True))
    if any(h <= o for o, h in zip(low, high, strict=True)):
        return None
    return low, tuple(h - o for o, h in zip(low, high, strict=True))


def merge(parts: Iterable[Mapping[str, Entry]]) -> dict[str, Entry]:
    """What each rank wrote, put together."""
    merged: dict[str, Entry] = {}
    for part in parts:
        for name, entry in part.items():
            so_far = merged.get(name, Entry(entry.dtype, entry.shape, ()))
            if (so_far.dtype, so_far.shape) != (entry.dtype, entry.shape):
                raise CheckpointError(f"the ranks do not agree on the dtype and shape of tensor '{name}'.")
            merged[name] = Entry(entry.dtype, entry.shape, so_far.slices + entry.slices)
    return dict(sorted(merged.items()))


def seal(head: bytes) -> bytes:
    """The end of a JSON object: its last member is the checksum of all bytes before the last comma."""
    return b',\n"xxh3_128":"%s"}\n' % xxh3_128_hexdigest(head).encode()


def sealed(data: bytes) -> bool:
    """Whether no byte has changed since."""
    head, _, tail = data.rpartition(b",")
    return b"," + tail == seal(head)


def _lines(table: dict[str, Any]) -> str:
    return "{\n" + ",\n".join(f"{_json(name)}:{_json(value)}" for name, value in table.items()) + "\n}"


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)

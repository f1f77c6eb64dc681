"""Kinds of damage, drawn by seed. What each makes bad is said beforehand; what makes nothing bad is harmless.

A kind of `HURTS` damages one checkpoint, through a shelf, and says in words what it did. Those of `SWAPS` damage two.
Those of `HARMLESS` must change nothing: the newest good checkpoint is loaded and nobody is alarmed.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass

from tests.checkpoint.shelves import BLOCK, GOOD, KNOWN_BAD, ZOMBIES, Disk, History, Shelf, files_of, flipped, some

from shoal.checkpoint import Name
from shoal.checkpoint.ledger import LEDGER
from shoal.checkpoint.names import MANIFEST, rank_file

RANK_FILES = [rank_file(0), rank_file(1)]


@dataclass(frozen=True)
class Draw:
    """What a kind of damage is given."""

    rng: random.Random
    shelf: Shelf
    history: History

    def file(self, name: Name, *files: str) -> str:
        """One of the named files of a checkpoint, or any of them."""
        return f"{name}/{self.rng.choice(files)}" if files else self.rng.choice(files_of(self.history.pristine, name))

    def change(self, file: str, data: bytes) -> None:
        """A damage that changes nothing would be a false promise."""
        assert data != self.history.pristine.get(file)
        self.shelf.write(file, data)

    def of(self, file: str) -> bytes:
        return self.history.pristine[file]


Hurt = Callable[[Draw, Name], str]


def flip_in(draw: Draw, file: str, begin: int, end: int) -> str:
    bit = draw.rng.randrange(8 * begin, 8 * end)
    draw.change(file, flipped(draw.of(file), bit))
    return f"bit {bit} of {file} flipped"


def flip_data(draw: Draw, name: Name) -> str:
    file = draw.file(name, *RANK_FILES)
    return flip_in(draw, file, _data_at(draw.of(file)), len(draw.of(file)))


def flip_header(draw: Draw, name: Name) -> str:
    file = draw.file(name, *RANK_FILES)
    return flip_in(draw, file, 0, _data_at(draw.of(file)))


def flip_manifest(draw: Draw, name: Name) -> str:
    file = f"{name}/{MANIFEST}"
    return flip_in(draw, file, 0, len(draw.of(file)))


def truncate(draw: Draw, name: Name) -> str:
    file = draw.file(name)
    left = len(draw.of(file)) - some(draw.rng, len(draw.of(file)))
    draw.change(file, draw.of(file)[:left])
    return f"{file} truncated to {left} bytes"


def extend(draw: Draw, name: Name) -> str:
    file = draw.file(name)
    more = draw.rng.choice([b"\0", b"\n", b" ", b"x", b"}"]) * some(draw.rng, 5000)
    draw.change(file, draw.of(file) + more)
    return f"{file} extended by {len(more)} bytes"


def lose_a_block(draw: Draw, name: Name) -> str:
    file = draw.file(name)
    data, at = draw.of(file), BLOCK * draw.rng.randrange(-(-len(draw.of(file)) // BLOCK))
    draw.change(file, (data[:at] + bytes(BLOCK) + data[at + BLOCK :])[: len(data)])
    return f"a block of {file}, at {at}, is zeros"


def tear_the_end(draw: Draw, name: Name) -> str:
    """The size is on the disk and the bytes from some block on are not, as after a power cut."""
    file = draw.file(name)
    data, at = draw.of(file), BLOCK * draw.rng.randrange(-(-len(draw.of(file)) // BLOCK))
    draw.change(file, data[:at] + bytes(len(data) - at))
    return f"{file} is zeros from {at} on"


def keep_old_blocks(draw: Draw, name: Name) -> str:
    """Some blocks are still those of the file that was at this place before."""
    file = draw.rng.choice(RANK_FILES)
    data, old = draw.of(f"{name}/{file}"), draw.of(f"{_another(draw.rng, name)}/{file}")
    blocks = draw.rng.sample(range(len(data) // BLOCK), some(draw.rng, len(data) // BLOCK))
    torn = bytearray(data)
    for block in blocks:
        torn[block * BLOCK : (block + 1) * BLOCK] = old[block * BLOCK : (block + 1) * BLOCK]
    draw.change(f"{name}/{file}", bytes(torn))
    return f"blocks {sorted(blocks)} of {name}/{file} are those of another step"


def delete_a_tensor_file(draw: Draw, name: Name) -> str:
    file = draw.file(name, *RANK_FILES)
    draw.shelf.delete(file)
    return f"{file} deleted"


def delete_the_manifest(draw: Draw, name: Name) -> str:
    draw.shelf.delete(f"{name}/{MANIFEST}")
    return f"{name}/{MANIFEST} deleted"


def delete_all_of_it(draw: Draw, name: Name) -> str:
    for file in files_of(draw.history.pristine, name):
        draw.shelf.delete(file)
    return f"{name} deleted"


def half_published(draw: Draw, name: Name) -> str:
    gone = [MANIFEST, draw.rng.choice(RANK_FILES)]
    for file in gone:
        draw.shelf.delete(f"{name}/{file}")
    return f"{' and '.join(gone)} of {name} never came"


def swap_ranks(draw: Draw, name: Name) -> str:
    a, b = (f"{name}/{file}" for file in RANK_FILES)
    draw.change(a, draw.of(b))
    draw.change(b, draw.of(a))
    return f"the files of {name} changed places"


def take_a_file_of_another_step(draw: Draw, name: Name) -> str:
    file, other = draw.rng.choice(RANK_FILES), _another(draw.rng, name)
    draw.change(f"{name}/{file}", draw.of(f"{other}/{file}"))
    return f"{file} of {other} lies in {name}"


def take_a_file_of_another_term(draw: Draw, name: Name) -> str:
    file, zombie = draw.rng.choice(RANK_FILES), draw.rng.choice(ZOMBIES)
    draw.change(f"{name}/{file}", draw.of(f"{zombie}/{file}"))
    return f"{file} of {zombie} lies in {name}"


def take_a_manifest_from_elsewhere(draw: Draw, name: Name) -> str:
    other = draw.rng.choice([_another(draw.rng, name), *ZOMBIES])
    draw.change(f"{name}/{MANIFEST}", draw.of(f"{other}/{MANIFEST}"))
    return f"{name} has the manifest of {other}"


def take_all_of_another_step(draw: Draw, name: Name) -> str:
    other = draw.rng.choice([_another(draw.rng, name), *ZOMBIES])
    for file in (MANIFEST, *RANK_FILES):
        draw.change(f"{name}/{file}", draw.of(f"{other}/{file}"))
    return f"{name} is a copy of {other}"


def take_a_file_of_another_run(draw: Draw, name: Name) -> str:
    """Another run's file with the same layout, and where it has the same name, with the same header."""
    file = draw.rng.choice([*RANK_FILES, MANIFEST])
    draw.change(f"{name}/{file}", draw.history.foreign[f"{GOOD[0]}/{file}"])
    return f"{file} of {name} is that of another run"


def put_something_else_there(draw: Draw, name: Name) -> str:
    file = draw.file(name)
    size = draw.rng.choice([len(draw.of(file)), some(draw.rng, 10_000)])
    what, data = draw.rng.choice(
        [("noise", draw.rng.randbytes(size)), ("text", b"see the other disk\n" * 3), ("ones", b"\xff" * size)]
    )
    draw.change(file, data)
    return f"{file} is {what}"


def put_a_folder_there(draw: Draw, name: Name) -> str:
    path = _disk(draw).root / draw.file(name)
    path.unlink()
    path.mkdir()
    return f"{path.name} of {name} is a folder"


def put_a_link_there(draw: Draw, name: Name) -> str:
    path = _disk(draw).root / draw.file(name)
    path.unlink()
    target = draw.rng.choice([path.name, "nowhere", "."])  # a loop, nothing, a folder
    os.symlink(target, path)
    return f"{path.name} of {name} is a link to {target}"


def put_a_file_in_place_of_all(draw: Draw, name: Name) -> str:
    folder = _disk(draw).root / str(name)
    shutil.rmtree(folder)
    folder.write_bytes(draw.rng.randbytes(100))
    return f"{name} is a file"


HURTS: dict[str, Hurt] = {
    "bit flipped in a tensor": flip_data,
    "bit flipped in a header": flip_header,
    "bit flipped in a manifest": flip_manifest,
    "truncated": truncate,
    "extended": extend,
    "a block of zeros": lose_a_block,
    "torn: the end is zeros": tear_the_end,
    "torn: blocks of an older file": keep_old_blocks,
    "a tensor file deleted": delete_a_tensor_file,
    "the manifest deleted": delete_the_manifest,
    "all of it deleted": delete_all_of_it,
    "half-published": half_published,
    "files of two ranks swapped": swap_ranks,
    "a file of another step": take_a_file_of_another_step,
    "a file of another term": take_a_file_of_another_term,
    "a manifest of another checkpoint": take_a_manifest_from_elsewhere,
    "a copy of another checkpoint": take_all_of_another_step,
    "a file of another run": take_a_file_of_another_run,
    "foreign bytes": put_something_else_there,
}
HURTS_ON_DISK: dict[str, Hurt] = {
    "a folder in place of a file": put_a_folder_there,
    "a link in place of a file": put_a_link_there,
    "a file in place of a checkpoint": put_a_file_in_place_of_all,
}


def swap_steps(draw: Draw) -> tuple[str, set[Name]]:
    file, (a, b) = draw.rng.choice([*RANK_FILES, MANIFEST]), sorted(draw.rng.sample(GOOD, 2))
    draw.change(f"{a}/{file}", draw.of(f"{b}/{file}"))
    draw.change(f"{b}/{file}", draw.of(f"{a}/{file}"))
    return f"{file} of {a} and {b} changed places", {a, b}


def swap_names(draw: Draw) -> tuple[str, set[Name]]:
    a, b = draw.rng.sample([*GOOD, *ZOMBIES], 2)
    for file in (MANIFEST, *RANK_FILES):
        draw.change(f"{a}/{file}", draw.of(f"{b}/{file}"))
        draw.change(f"{b}/{file}", draw.of(f"{a}/{file}"))
    return f"{a} and {b} changed names", {a, b} & set(GOOD)


def forget_a_quarantine(draw: Draw) -> tuple[str, set[Name]]:
    draw.shelf.delete(f"{LEDGER}/quarantined-{KNOWN_BAD}.json")
    return f"that {KNOWN_BAD} is bad was forgotten", {KNOWN_BAD}


SWAPS: dict[str, Callable[[Draw], tuple[str, set[Name]]]] = {
    "files of two steps swapped": swap_steps,
    "names of two checkpoints swapped": swap_names,
    "a quarantine forgotten": forget_a_quarantine,
}


def _data_at(data: bytes) -> int:
    return 8 + int.from_bytes(data[:8], "little")


def _another(rng: random.Random, name: Name) -> Name:
    return rng.choice([other for other in GOOD if other != name])


def _disk(draw: Draw) -> Disk:
    assert isinstance(draw.shelf, Disk)
    return draw.shelf

"""What looks like damage and must change nothing: the newest good checkpoint is loaded, and nobody is alarmed."""

from __future__ import annotations

import os
from collections.abc import Callable

from tests.checkpoint.damages import RANK_FILES, Draw
from tests.checkpoint.shelves import GOOD, KNOWN_BAD, ZOMBIES, Disk, files_of, flipped, some

from shoal.checkpoint import Name
from shoal.checkpoint.ledger import LEDGER
from shoal.checkpoint.names import MANIFEST, part_file

LATER = Name(90, 2)


def leave_foreign_files(draw: Draw) -> str:
    places = [
        "notes.txt", "latest", ".DS_Store", "lost+found/#12", "step-later/manifest.json", "step-00000090/manifest.json",
        "step-00000090-term-02/manifest.json", "step-90-term-2/manifest.json", f"{GOOD[0]}/.nfs0001",
        f"{GOOD[0]}/rank-00002.safetensors", f"{GOOD[0]}/{part_file(0)}", f"{GOOD[0]}/old/manifest.json",
        f"{LEDGER}/notes.json", f"{LEDGER}/claim-00009-from-x-00.json", f"{LEDGER}/published-step-90.json",
        f"{LEDGER}/.claim-00009-from-0-aa.json.123", f"{LEDGER}/quarantined-all.json",
    ]  # fmt: skip
    chosen = draw.rng.sample(places, 3)
    for place in chosen:
        draw.shelf.write(place, draw.rng.choice([b"", b"{}", draw.rng.randbytes(some(draw.rng, 5000))]))
    return f"foreign files: {', '.join(chosen)}"


def leave_a_dead_save(draw: Draw) -> str:
    """Of this term or of an earlier one, dead before, while, or after its ranks had written."""
    name = draw.rng.choice([LATER, Name(90, 1), Name(45, 2), Name(50, 1)])
    folder = f".tmp-{name}" if draw.shelf.on_disk else str(name)
    files = [*RANK_FILES, part_file(0), part_file(1)][: draw.rng.randint(1, 4)]
    if draw.shelf.on_disk and draw.rng.random() < 0.3:
        files += [MANIFEST]  # killed right before it was renamed
    for file in files:
        data = draw.history.pristine.get(f"{GOOD[0]}/{file}", b"{}")
        draw.shelf.write(f"{folder}/{file}", data[: some(draw.rng, len(data))])
    return f"{folder} has {', '.join(files)}"


def leave_a_half_deleted_one(draw: Draw) -> str:
    """Retention was killed: it is out of the ledger, and on its way out of the store."""
    name = GOOD[-1]
    draw.shelf.delete(f"{LEDGER}/published-{name}.json")
    files = files_of(draw.history.pristine, name)
    for file in files:
        if draw.shelf.on_disk:
            draw.shelf.write(f".old-{file}", draw.of(file))
        if draw.shelf.on_disk or file.endswith(MANIFEST):
            draw.shelf.delete(file)
    return f"{name} is half deleted"


def let_a_zombie_publish(draw: Draw) -> str:
    """One that was believed dead: whole, of a higher step than all there is, recorded or not."""
    names = draw.rng.choice([["step-00000070"], ["step-00000080"], ["step-00000070", "step-00000080"]])
    recorded = draw.rng.random() < 0.5
    for file, data in draw.history.spare.items():
        if any(name in file for name in names) and (recorded or not file.startswith(LEDGER)):
            draw.shelf.write(file, data)
    return f"a zombie published {', '.join(names)}{'' if recorded else ', unrecorded'}"


def damage_a_zombie(draw: Draw) -> str:
    file = draw.file(draw.rng.choice(ZOMBIES))
    draw.shelf.write(file, flipped(draw.of(file), draw.rng.randrange(8 * len(draw.of(file)))))
    return f"a bit of {file} flipped, which nobody reads"


def damage_what_is_quarantined(draw: Draw) -> str:
    file = draw.file(KNOWN_BAD)
    draw.shelf.delete(file)
    return f"{file} deleted, which nobody reads"


def lose_entries(draw: Draw) -> str:
    """`published` is evidence of what is gone; what is there is found without it."""
    entries = [e for e in _entries(draw) if "/published-" in e]
    lost = draw.rng.sample(entries, draw.rng.choice([1, 2, len(entries)]))
    for entry in lost:
        draw.shelf.delete(entry)
    return f"lost: {', '.join(lost)}"


def lose_claims(draw: Draw) -> str:
    """Then the checkpoints of the term say that it took over; a zombie's must not come back."""
    claims = [e for e in _entries(draw) if "/claim-" in e]
    lost = draw.rng.choice([claims, claims[-1:], claims[:1]])
    for entry in lost:
        draw.shelf.delete(entry)
    return f"lost: {', '.join(lost)}"


def lose_the_ledger(draw: Draw) -> str:
    """All of it but what is known to be bad."""
    lost = [e for e in _entries(draw) if "/quarantined-" not in e]
    for entry in lost:
        draw.shelf.delete(entry)
    return "lost: the ledger"


def garble_an_entry(draw: Draw) -> str:
    """An entry is its name; what is written in it is for people."""
    entry = draw.rng.choice(_entries(draw))
    data = draw.rng.choice([b"", b"{", bytes(100), draw.rng.randbytes(50), draw.of(entry)[:5]])
    draw.shelf.write(entry, data)
    return f"{entry} holds {data[:10]!r}"


def leave_a_claim_that_gave_way(draw: Draw) -> str:
    """Two started at once, and the one that gave way was killed before it could take its claim back."""
    term, step = draw.rng.choice([(1, "none"), (2, "30"), (2, "20")])
    claim = f"{LEDGER}/claim-{term:05d}-from-{step}-{draw.rng.randrange(1 << 32):08x}.json"
    draw.shelf.write(claim, b"{}")
    return f"{claim} was left behind"


def change_times(draw: Draw) -> str:
    assert isinstance(draw.shelf, Disk)
    for file in draw.shelf.names():
        os.utime(draw.shelf.root / file, (0, draw.rng.randrange(1 << 31)))
    return "files have other times"


HARMLESS: dict[str, Callable[[Draw], str]] = {
    "foreign files beside and within": leave_foreign_files,
    "leftovers of a dead save": leave_a_dead_save,
    "a half-deleted old one": leave_a_half_deleted_one,
    "a zombie of an older term publishes": let_a_zombie_publish,
    "a zombie's checkpoint damaged": damage_a_zombie,
    "a quarantined one damaged more": damage_what_is_quarantined,
    "entries of what is there lost": lose_entries,
    "claims lost": lose_claims,
    "the ledger lost": lose_the_ledger,
    "the text of an entry garbled": garble_an_entry,
    "a claim that gave way left behind": leave_a_claim_that_gave_way,
}
HARMLESS_ON_DISK: dict[str, Callable[[Draw], str]] = {"times of files changed": change_times}


def _entries(draw: Draw) -> list[str]:
    return sorted(name for name in draw.history.pristine if name.startswith(f"{LEDGER}/"))

"""Finds the checkpoints in one or several stores and tells the good ones from the bad ones. No torch here.

The newest good checkpoint is derived from what is there, each time. There is no pointer that could dangle.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from shoal.checkpoint import ledger
from shoal.checkpoint.files import digest_of, digests_of
from shoal.checkpoint.manifest import Corrupt, Manifest, decode
from shoal.checkpoint.names import MANIFEST, Name
from shoal.checkpoint.store import Store, at_once, store_of
from shoal.errors import CheckpointError, SetupError, TransientError

Root = str | os.PathLike[str] | Store
Roots = Root | Sequence[Root]
Read = TypeVar("Read")

# What says nothing about the bytes on the disk: the process or the network is at its limit, and a retry may cure it.
_PASSING = frozenset(
    {
        errno.EAGAIN, errno.EBUSY, errno.ECONNABORTED, errno.ECONNREFUSED, errno.ECONNRESET, errno.EHOSTDOWN,
        errno.EHOSTUNREACH, errno.EINTR, errno.EMFILE, errno.ENETDOWN, errno.ENETUNREACH, errno.ENFILE, errno.ENOBUFS,
        errno.ENOLCK, errno.ENOMEM, errno.ENOTCONN, errno.ESHUTDOWN, errno.ESTALE, errno.ETIMEDOUT,
    }
)  # fmt: skip


class NoManifest(Corrupt):
    """Damage, or a save that was never finished."""


@dataclass(frozen=True)
class Skipped:
    """A checkpoint that was passed over, and why: for the journal."""

    store: Store
    name: Name
    reason: str
    known: bool = False  # it was quarantined before, and journaled then

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


@dataclass(frozen=True)
class Found:
    """A checkpoint that is complete: every file is there, has its size and its header."""

    store: Store
    name: Name
    manifest: Manifest
    skipped: tuple[Skipped, ...] = ()  # newer ones that are bad
    folder: str = ""  # where its files are, while it is not published yet

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def where(self) -> str:
        return f"{self.store.where}/{self.name}"

    @property
    def extra(self) -> dict[str, Any]:
        return self.manifest.extra

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.manifest.files.values())

    def path(self, file: str) -> str:
        return f"{self.folder or self.name}/{file}"


@dataclass(frozen=True)
class Listed:
    """A checkpoint that was published once, as the listings and the ledgers tell it."""

    store: Store
    name: Name
    on_history: bool
    quarantined: bool
    there: bool  # else only the ledger knows it
    recorded: bool  # in the ledger, as published

    def may_be_unfinished(self) -> bool:
        """Where files are gathered under the final name, one without a manifest may be a save in progress, or dead."""
        return not self.recorded and self.store.staging(str(self.name)) == str(self.name)


def stores_of(roots: Roots) -> list[Store]:
    """One store or several, the preferred one first."""
    if isinstance(roots, Sequence) and not isinstance(roots, str):
        return [store_of(root) for root in roots]
    return [store_of(roots)]


def published(roots: Roots) -> list[Listed]:
    """Everything that was published, good or bad, newest first; of equals, that of the preferred store first."""
    found: list[tuple[Name, int, Store, ledger.Ledger, bool]] = []
    claims: list[ledger.Claim] = []
    for i, store in enumerate(stores_of(roots)):
        with listing(store):
            book = ledger.read(store)  # first: what is published in between is there, and not missed
            there = {name for entry in store.list() if (name := Name.of(entry))}
        claims += book.claims
        found += [(name, -i, store, book, name in there) for name in there | book.published]
    claims += _lost_claims(claims, [(store, name) for name, _, store, _, is_there in found if is_there])
    history = ledger.Ledger(tuple(claims), frozenset(), frozenset())
    return [
        Listed(store, name, history.on_history(name), name in book.quarantined, is_there, name in book.published)
        for name, _, store, book, is_there in sorted(found, key=lambda item: item[:2], reverse=True)
    ]


def _lost_claims(claims: Sequence[ledger.Claim], there: Sequence[tuple[Store, Name]]) -> list[ledger.Claim]:
    """A term that has published went on from no later a step than that of the first that it published.

    This is read from the manifests, and only where the ledger has lost the term's claim: without it a branch that was
    left behind would be the newest again.
    """
    claimed, lost = {claim.term for claim in claims}, []
    oldest = min((name.term for _, name in there), default=0)
    for store, name in sorted(there, key=lambda item: item[1]):
        if name.term > oldest and name.term not in claimed:
            with contextlib.suppress(CheckpointError):  # a name alone proves nothing
                read_manifest(store, name)
                claimed.add(name.term)
                lost.append(ledger.Claim(name.term, name.step, "lost"))
    return lost


def open_checkpoint(root: Root, name: Name, headers: bool = True) -> Found:
    """The cheap check, else `Corrupt`: a whole manifest that fits its name, every file with its size and header.
    Without `headers` those are somebody else's to look at."""
    store = store_of(root)
    found = Found(store, name, read_manifest(store, name))
    if headers:
        check_headers(found)
    return found


def read_manifest(store: Store, name: Name) -> Manifest:
    """A whole manifest that fits its name, else `Corrupt`."""
    with reading(MANIFEST, f"{store.where}/{name}"):
        try:
            data = store.read(f"{name}/{MANIFEST}")
        except FileNotFoundError:
            raise NoManifest("it has no manifest.json (half-published, or partly deleted)") from None
    manifest = decode(data)
    if (manifest.step, manifest.term) != (name.step, name.term):
        raise Corrupt(f"its manifest.json is that of {Name(manifest.step, manifest.term)}")
    return manifest


def check_headers(found: Found, files: Iterable[str] | None = None) -> None:
    """`Corrupt` unless every file (of these) is there, with its size and header."""
    at_once(found.store, lambda file: _check_header(found, file), found.manifest.files if files is None else files)


def newest(roots: Roots, verify: bool = False, before: Name | None = None) -> Found | None:
    """The newest good checkpoint (of those before `before`); what is bad and newer is in its `skipped`.

    None when nothing was ever published. When all there is is bad, that is a `CheckpointError`: a run with a history is
    not quietly started from scratch. `verify` reads everything and compares all checksums; loading does so anyway.
    """
    found, skipped = scan(roots, verify, before)
    if found is None and skipped:
        raise none_is_good(roots, skipped)
    return found


def scan(
    roots: Roots,
    verify: bool = False,
    before: Name | None = None,
    tried: Collection[tuple[str, Name]] = (),
    headers: Callable[[Store], bool] = lambda store: True,
) -> tuple[Found | None, list[Skipped]]:
    """Like `newest`, but what is bad is always returned, too. `tried` were found bad by the caller: (where, name).
    `headers`: of which stores the headers are looked at here, and not by the caller."""
    skipped: list[Skipped] = []
    for one in published(roots):
        if (before is not None and one.name >= before) or not one.on_history or (one.store.where, one.name) in tried:
            continue
        if one.quarantined:
            reason = ledger.quarantine_reason(one.store, one.name)
            skipped.append(Skipped(one.store, one.name, f"quarantined: {reason}", known=True))
            continue
        try:
            # Even if it is not listed: NFS may show an old listing.
            found = open_checkpoint(one.store, one.name, headers(one.store))
            if verify and (wrong := damage(found)):
                raise Corrupt(wrong[0])
        except Corrupt as e:
            if not (isinstance(e, NoManifest) and one.may_be_unfinished()):
                gone = isinstance(e, NoManifest) and not one.there
                skipped.append(Skipped(one.store, one.name, "it was published, and is gone" if gone else str(e)))
            continue
        except CheckpointError as e:
            raise CheckpointError(f"{one.store.where}/{one.name} cannot be read: {e}.") from e
        return replace(found, skipped=tuple(skipped)), skipped
    return None, skipped


def newest_readable(
    roots: Roots, read: Callable[[Found], Read], passed_over: Callable[[str], None]
) -> tuple[Found, Read]:
    """The newest checkpoint that `read` can take in: damage shows only when bytes are read, and then the one before
    is tried. `passed_over` hears about each that was not taken."""
    tried: set[tuple[str, Name]] = set()
    while True:
        found, skipped = scan(roots, tried=tried)
        for bad in skipped:
            passed_over(str(bad))
        tried |= {(bad.store.where, bad.name) for bad in skipped}
        if found is None:
            where = " or ".join(store.where for store in stores_of(roots))
            raise CheckpointError(f"there is no checkpoint that can be used in {where}.")
        try:
            return found, read(found)
        except Corrupt as e:
            passed_over(str(e))
            tried.add((found.store.where, found.name))


def none_is_good(roots: Roots, skipped: Collection[Skipped]) -> CheckpointError:
    reasons = "; ".join(map(str, skipped))
    where = " or ".join(store.where for store in stores_of(roots))
    return CheckpointError(
        f"no checkpoint in {where} can be used ({reasons}): restore one from a copy, "
        "or remove them and start again under another name."
    )


def quarantine(bad: Skipped) -> None:
    """Marks it so that nobody tries it again. A store that cannot be written must not keep a run from going on."""
    with contextlib.suppress(OSError, TransientError, SetupError):
        ledger.quarantine(bad.store, bad.name, bad.reason)


def damage(
    found: Found, files: Collection[str] | None = None, on_bytes: Callable[[int], None] = lambda n: None
) -> list[str]:
    """Reads the files (all unless told) and says what is wrong with them, a sentence for each damaged file or block.

    `on_bytes` hears how much was read, for a progress bar.
    """
    wrong: list[str] = []
    for file in found.manifest.files if files is None else files:
        try:
            _check_header(found, file)
            wrong += _damaged_blocks(found, file, on_bytes)
        except Corrupt as e:
            wrong.append(str(e))
    return wrong


def verify(found: Found) -> None:
    """Every byte against its checksum; `Corrupt`, which names the file, at the first that differs."""
    if wrong := damage(found):
        raise Corrupt(f"checkpoint {found.where} is damaged: {wrong[0]}.")


def mismatch(manifest: Manifest, file: str, at: int, count: int) -> str:
    """What a block with another checksum means for people: the tensors in it, the file, and where in it."""
    held = [name for name, size, s in manifest.rows.in_file(file) if s.at < at + count and at < s.at + size]
    names = sorted(set(held), key=held.index)
    whose = "'" + "', '".join(names[:3]) + "'" + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return (
        f"the bytes of {whose} in {file} are not those that were written "
        f"(their checksum does not match: {count} bytes from byte {at} on)"
    )


@contextmanager
def reading(file: str, where: str = "") -> Iterator[None]:
    """What the system refuses is `Corrupt`, with the name of the file, unless a retry may cure it."""
    try:
        yield
    except FileNotFoundError:
        raise Corrupt(f"{file} is missing") from None
    except EOFError:
        raise Corrupt(f"{file} is too short") from None
    except OSError as e:
        if e.errno in _PASSING:
            path = f"{where}/{file}" if where else file
            raise TransientError(f"{path} cannot be read now ({e.strerror}): try again.") from e
        # Also a disk that fails while it is read, and a file that this user may not read.
        raise Corrupt(f"{file} cannot be read ({e.strerror or e})") from e


@contextmanager
def listing(store: Store) -> Iterator[None]:
    """A store whose listing fails says nothing about its checkpoints; nobody begins anew because of it."""
    try:
        yield
    except OSError as e:
        words = f"the checkpoints in {store.where} cannot be listed ({e.strerror})"
        if e.errno in _PASSING or e.errno == errno.EIO:
            raise TransientError(f"{words}: try again.") from e
        raise SetupError(f"{words}: make the folder readable.") from e


def _check_header(found: Found, name: str) -> None:
    file, path = found.manifest.files[name], found.path(name)
    with reading(name, found.where):
        size = found.store.size(path)
        if size != file.bytes:
            raise Corrupt(f"{name} has {size} bytes where {file.bytes} were written")
        if digest_of(found.store, path, 0, file.header_bytes) != file.header_xxh3_128:
            raise Corrupt(f"{name} has another header than was written (damaged, or a file from elsewhere)")


def _damaged_blocks(found: Found, name: str, on_bytes: Callable[[int], None]) -> Iterator[str]:
    blocks = list(found.manifest.files[name].blocks())
    with reading(name, found.where):
        digests = digests_of(found.store, found.path(name), [(at, count) for at, count, _ in blocks])
        for (at, count, written), digest in zip(blocks, digests, strict=True):
            on_bytes(count)
            if digest != written:
                yield mismatch(found.manifest, name, at, count)

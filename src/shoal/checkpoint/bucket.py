"""Checkpoints in a bucket: s3://bucket/prefix, and file:///folder for trying it out (nothing is fsynced there).

Nothing can be renamed, so the files of a checkpoint are gathered under its final name and its manifest is put last:
that one request publishes it. What is assumed of the store: a listing shows every write that has returned before.
Every write carries a CRC-64 of its bytes that the store compares; not every store compares those that are signed.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, TypeVar

from shoal import objects
from shoal.checkpoint.names import MANIFEST

PART_BYTES = 32 << 20  # a store takes 10,000 parts, so a file of a rank may have 312 GiB
PARTS_AT_ONCE = 4
PIECE_BYTES = 8 << 20
READ_BYTES = 256 << 10
TRIES = 3
_RETRIES = 1000  # the time decides
Answer = TypeVar("Answer")


class Bucket:
    """An object store. A server that is down, or says nothing, is a TransientError after about `patience_s`."""

    readers = 16

    def __init__(self, url: str, patience_s: float = 30.0) -> None:
        self.where = url.rstrip("/")
        self._is_s3 = url.startswith("s3://")
        # A read may take long as long as something arrives; of an upload nothing is heard until it is over, and a slow
        # line is met with fewer parts at a time.
        half_s = patience_s / 2
        self._reads = self._connect(half_s, timeout_s=20 * patience_s, stall_s=half_s)
        self._writes = self._connect(half_s, timeout_s=patience_s)
        self._parts_at_once = PARTS_AT_ONCE

    def _connect(self, retry_s: float, timeout_s: float, stall_s: float | None = None) -> Any:
        checksum = os.environ.get("AWS_CHECKSUM_ALGORITHM", "CRC64NVME")
        # Signing the bytes too would take twice the processor time of all the rest, and guard only the way there.
        s3 = {"checksum_algorithm": checksum, "unsigned_payload": True} if self._is_s3 else {}
        return objects.connect(self.where, "checkpoints", _RETRIES, retry_s, timeout_s, stall_s, create=True, **s3)

    def __repr__(self) -> str:
        return f"Bucket({self.where})"

    @property
    def compares(self) -> bool:
        """Of every part that is sent to S3 a checksum goes with it; what is different is refused (decision 019)."""
        return self._is_s3

    def list(self, folder: str = "") -> list[str]:
        import obstore

        found = self._ask(folder, lambda: obstore.list_with_delimiter(self._reads, folder or None))
        paths = [*found["common_prefixes"], *(entry["path"] for entry in found["objects"])]
        return [path.rpartition("/")[2] for path in paths if path != folder]  # some stores list the folder itself

    def sizes(self, folder: str) -> dict[str, int]:
        import obstore

        found = self._ask(folder, lambda: obstore.list_with_delimiter(self._reads, folder))
        return {entry["path"].rpartition("/")[2]: int(entry["size"]) for entry in found["objects"]}

    def size(self, name: str) -> int:
        import obstore

        return int(self._ask(name, lambda: obstore.head(self._reads, name))["size"])

    def read(self, name: str) -> bytes:
        import obstore

        return self._ask(name, lambda: bytes(obstore.get(self._reads, name).bytes()))

    def read_into(self, name: str, at: int, into: memoryview) -> None:
        import obstore

        if not into.nbytes:
            return
        options = {"range": (at, at + into.nbytes)}

        def fill() -> int:
            done = 0
            for piece in obstore.get(self._reads, name, options=options).stream(READ_BYTES):
                into[done : done + len(piece)] = piece
                done += len(piece)
            return done

        if self._ask(name, fill) < into.nbytes:
            raise EOFError(name)

    def put(self, name: str, data: bytes) -> None:
        import obstore

        for _ in range(TRIES - 1):
            try:
                obstore.put(self._writes, name, data, use_multipart=False)
                return
            except Exception as e:
                if objects.code_of(e) != "BadDigest":  # else it was damaged on its way, and is sent again
                    raise objects.explained(e, self.where) from None
        self._ask(name, lambda: obstore.put(self._writes, name, data, use_multipart=False))

    def write(self, name: str, chunks: Iterable[memoryview]) -> None:
        """In parts, some at a time. When it fails the parts are dropped, if the store still answers."""
        import obstore

        pieces, first, size = _pieces(chunks), [], 0
        while size <= PART_BYTES and (piece := next(pieces, None)) is not None:
            first.append(piece)
            size += piece.nbytes
        if size <= PART_BYTES:
            self.put(name, b"".join(first))
            return
        broken: list[Exception] = []

        def whole() -> Iterator[memoryview]:
            try:
                yield from chain(first, pieces)
            except Exception as e:
                broken.append(e)
                raise

        try:
            obstore.put(self._writes, name, whole(), chunk_size=PART_BYTES, max_concurrency=self._parts_at_once)
        except Exception as e:
            if broken:  # it was not the store
                raise broken[0] from None
            if objects.timed_out(e):
                self._parts_at_once = max(1, self._parts_at_once // 2)  # for whoever tries again
            raise objects.explained(e, self.where) from None
        self._parts_at_once = min(PARTS_AT_ONCE, self._parts_at_once + 1)

    def staging(self, name: str) -> str:
        return name

    def publish(self, name: str) -> None:
        """The manifest, which is put last, has done it."""

    def remove(self, name: str) -> None:
        import obstore

        assert name.strip("/"), "everything is never removed"
        inside = self._ask(name, lambda: [entry["path"] for entry in obstore.list(self._reads, name).collect()])
        manifest = f"{name}/{MANIFEST}"
        if manifest in inside:  # first and alone: without it the rest is no checkpoint any more
            self._delete([manifest])
        others = [path for path in inside if path not in (manifest, name)]
        self._delete(others)
        if self._is_s3 or not inside:
            self._delete([name])  # a file; or the empty folder that some stores keep when all in it is gone

    def sweep(self) -> None:
        """A half-done removal leaves files without a manifest, as an unfinished save does, and goes with those."""

    def _delete(self, names: Sequence[str]) -> None:
        import obstore

        if names:
            with contextlib.suppress(FileNotFoundError):  # file:// minds that it is gone already
                self._ask(names[0], lambda: obstore.delete(self._writes, names))

    def _ask(self, name: str, question: Callable[[], Answer]) -> Answer:
        try:
            return question()
        except Exception as e:
            if objects.past_the_end(e):
                raise EOFError(name) from None
            if objects.is_missing(e):
                raise FileNotFoundError(errno.ENOENT, f"{self.where} has no such object", name) from None
            raise objects.explained(e, self.where) from None


def _pieces(chunks: Iterable[memoryview]) -> Iterator[memoryview]:
    """The same bytes, never many at a time: of one large chunk all parts would be sent at once."""
    for chunk in chunks:
        for at in range(0, chunk.nbytes, PIECE_BYTES):
            yield chunk[at : at + PIECE_BYTES]

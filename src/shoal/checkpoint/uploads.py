"""Copies each checkpoint that is on disk to the second store, in a thread of the persister. No torch here.

All ranks copy the same ones, since the trainers have agreed on which (`shoal.train.saves`): one at a time, so that a
store that is slow or away costs copies and neither memory nor disk. One that cannot be reached is tried again for as
long as the run goes on; when the worker is gone, for a while.
"""

from __future__ import annotations

import mmap
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from xxhash import xxh3_128_hexdigest

from shoal.checkpoint import ledger
from shoal.checkpoint.blocks import Digests
from shoal.checkpoint.error_text import words_of
from shoal.checkpoint.faulty import Corrupt
from shoal.checkpoint.files import CHUNK_BYTES
from shoal.checkpoint.find import Found
from shoal.checkpoint.names import Name, rank_file
from shoal.checkpoint.part import Part, tell_rank_0, write_known
from shoal.checkpoint.publish import drop_unfinished
from shoal.checkpoint.store import Folder, Store
from shoal.errors import TransientError

BACKOFF_S, LONGEST_BACKOFF_S = 2.0, 60.0
ALONE_S = 600.0  # without a worker


@dataclass(frozen=True)
class Upload:
    """A rank's file on its way. Its descriptor outlives the renaming and the deletion of it."""

    name: Name
    part: Part
    file: mmap.mmap
    extra: dict[str, Any]


def open_upload(store: Store, name: Name, part: Part, extra: dict[str, Any]) -> Upload:
    """Of what this rank has written: it is published, or it will be at any moment."""
    assert isinstance(store, Folder), "what is copied was on disk first"
    for folder in (store.staging(str(name)), str(name)):
        try:
            with open(store.path(f"{folder}/{rank_file(part.rank)}"), "rb") as f:
                return Upload(name, part, mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ), extra)
        except FileNotFoundError:
            continue
    raise FileNotFoundError(f"{store.where}/{name} is gone")


class Uploads:
    def __init__(
        self,
        store: Store,
        first: Store,
        term: int,
        say: Callable[..., None],
        publish: Callable[[Store, Name, dict[str, Any], float, Callable[[], bool]], Found],
        prune: Callable[[Store], None],
    ) -> None:
        self._store, self._first, self._term = store, first, term
        self._say, self._publish, self._prune = say, publish, prune
        self._queue: queue.SimpleQueue[Upload | None] = queue.SimpleQueue()
        self._alone = threading.Event()
        self._alone_since = 0.0
        self._thread = threading.Thread(target=self._work, name="upload", daemon=True)
        self._thread.start()

    def add(self, upload: Upload) -> None:
        self._queue.put(upload)

    def worker_is_gone(self) -> None:
        self._alone_since = time.monotonic()
        self._alone.set()

    def finish(self) -> None:
        self._queue.put(None)
        self._thread.join(ALONE_S + 60.0)  # whatever a client library does, this process ends

    def _work(self) -> None:
        while (upload := self._queue.get()) is not None:
            wait, began = BACKOFF_S, time.perf_counter()
            while True:
                try:
                    self._upload(upload, began)
                    break
                except Exception as e:
                    about = {"error": words_of(e), "rank": upload.part.rank}
                    if isinstance(e, ledger.Fenced):
                        self._say("fenced", upload.name.step, **about)
                        break
                    if not isinstance(e, OSError | TransientError) or self._hopeless():
                        tell_rank_0(self._store, upload.name, upload.part.rank, words_of(e))
                        self._say("upload-failed", upload.name.step, **about)
                        if self._alone.is_set():  # nobody hears it, so that the log must
                            print(f"shoal: {upload.name} was not copied: {words_of(e)}", file=sys.stderr)
                        break
                    self._say("upload-retry", upload.name.step, **about)
                self._pause(wait)
                wait = min(2 * wait, LONGEST_BACKOFF_S)

    def _pause(self, wait: float) -> None:
        if self._alone.is_set():
            time.sleep(BACKOFF_S)
        else:
            self._alone.wait(wait)

    def _hopeless(self) -> bool:
        """Whether nobody waits for it any more."""
        if not self._alone.is_set():
            return False
        try:
            ledger.check_term(self._first, self._term)
        except Exception:
            return True
        return time.monotonic() - self._alone_since > ALONE_S

    def _upload(self, upload: Upload, began: float) -> None:
        store, rank, tried = self._store, upload.part.rank, time.perf_counter()
        if rank == 0:
            drop_unfinished(store, upload.name)
        write_known(store, upload.name, rank, as_written(upload), lambda: upload.part)
        if rank > 0:
            self._say("sent", upload.name.step)
            return
        found = self._publish(store, upload.name, upload.extra, tried, self._hopeless)
        seconds = time.perf_counter() - began
        self._say("uploaded", upload.name.step, bytes=found.bytes, seconds=seconds, where=store.where)
        self._prune(store)


def as_written(upload: Upload) -> Iterator[memoryview]:
    """The file on its way. What the disk gives back is compared with the checksums of what was written to it, and the
    store compares what arrives: then what is there is good to its last byte, and need not be read back."""
    file, data, at = upload.part.file, memoryview(upload.file), 0
    digests = Digests(upload.part.layout.block_bytes)
    well = xxh3_128_hexdigest(data[: file.header_bytes]) == file.header_xxh3_128
    for chunk in chunks_of(upload.file):
        digests.update(chunk[max(0, file.header_bytes - at) :])
        at += chunk.nbytes
        yield chunk
    if not well or digests.finish() != file.digests:
        raise Corrupt(f"{rank_file(upload.part.rank)} of {upload.name} is on the disk no more as it was written to it")


def chunks_of(file: mmap.mmap) -> Iterator[memoryview]:
    whole = memoryview(file)
    for at in range(0, len(whole), CHUNK_BYTES):
        yield whole[at : at + CHUNK_BYTES]

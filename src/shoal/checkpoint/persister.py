"""The process that writes a rank's snapshots out: `python -m shoal.checkpoint.persister`. No torch here.

It reads JSON lines (the first says where and how, the others what), and answers with JSON lines. It leads a session of
its own and does not hear SIGTERM: when its worker is killed, the save in flight is finished all the same, and then it
ends. Ranks exchange nothing; each writes its file and its part, and rank 0's persister waits until all parts are there.
"""

from __future__ import annotations

import json
import mmap
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from xxhash import xxh3_128_hexdigest

from shoal.checkpoint import faults, ledger
from shoal.checkpoint.files import CHUNK_BYTES
from shoal.checkpoint.find import Found
from shoal.checkpoint.in_memory import InMemory
from shoal.checkpoint.manifest import File
from shoal.checkpoint.names import Name, part_file, rank_file
from shoal.checkpoint.part import Contents, Part, decode_contents, encode_part, part_of, write_known
from shoal.checkpoint.publish import complete, prune
from shoal.checkpoint.setup import Setup
from shoal.checkpoint.store import Folder, Store, store_of
from shoal.checkpoint.words import words_of
from shoal.errors import CheckpointError, ShoalError, TransientError

TRIES, BACKOFF_S = 4, 1.0  # of a local save: after these seven seconds the next save is the better try
UPLOAD_BACKOFF_S, LONGEST_BACKOFF_S = 2.0, 60.0
NICE = 5
Done = TypeVar("Done")


@dataclass(frozen=True)
class Job:
    step: int
    slot: int
    durable: bool
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Upload:
    """A rank's file on its way to the second store. Its descriptor outlives the renaming and the deletion of it."""

    name: Name
    part: Part
    file: mmap.mmap
    extra: dict[str, Any]


class Persister:
    def __init__(self, setup: Setup, slots: list[int], contents: Contents) -> None:
        self.setup, self.contents = setup, contents
        self.header_bytes = len(contents.header(Name(0, 0)))
        self.slots = [mmap.mmap(fd, 0, prot=mmap.PROT_READ) for fd in slots]
        self.first = store_of(setup.stores[0])
        self.second = store_of(setup.stores[1]) if len(setup.stores) > 1 else None
        self.given_up: set[int] = set()
        self.known_good: dict[str, set[Name]] = {}
        self._say = threading.Lock()
        self.memory = InMemory(setup, self.say)
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._uploads: queue.SimpleQueue[Upload | None] = queue.SimpleQueue()
        self._pending_uploads = 0
        self._threads = [threading.Thread(target=self._work, name="persist")]
        if self.second is not None:
            self._threads.append(threading.Thread(target=self._upload_all, name="upload"))
        for thread in self._threads:
            thread.start()

    def take(self, order: dict[str, Any]) -> None:
        if order["do"] == "save":
            self._jobs.put(Job(order["step"], order["slot"], order["durable"], order.get("extra", {})))
        elif order["do"] == "give-up":
            self.given_up.add(order["step"])

    def finish(self) -> None:
        """No more orders will come: what has been ordered is done, and then everybody goes."""
        self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def say(self, event: str, step: int, **fields: Any) -> None:
        line = json.dumps({"event": event, "step": step, **fields}) + "\n"
        with self._say:
            try:
                sys.stdout.write(line)
                sys.stdout.flush()
            except (BrokenPipeError, ValueError):  # the worker is gone; the work is worth finishing
                return

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if job.durable:
                    self._save(job)
                else:
                    self._copy(job, self._take_in(job))
                    self.say("free", job.step, slot=job.slot)
                    self.say("kept", job.step)
            except Exception as e:
                self.say("free", job.step, slot=job.slot)
                self.say(
                    "fenced" if isinstance(e, ledger.Fenced) else "failed",
                    job.step,
                    error=words_of(e),
                    rank=self.setup.rank,
                )
        self._uploads.put(None)

    def _save(self, job: Job) -> None:
        began, name, store, rank = time.perf_counter(), Name(job.step, self.setup.term), self.first, self.setup.rank
        how = self.setup.read_back_of(store)
        with ThreadPoolExecutor(1, "checksum") as beside:
            part_known = beside.submit(self._take_in, job)
            beside.submit(lambda: self._copy(job, part_known.result()))  # the slot is free when it has been sent
            try:
                part = self._patiently(
                    job.step,
                    lambda: write_known(store, name, rank, chunks_of(self.slots[job.slot]), part_known.result, how),
                )
            except Exception as e:
                _tell_rank_0(store, name, rank, words_of(e))
                raise
        upload = self._open(store, name, part, job.extra) if self.second is not None else None
        self.say("free", job.step, slot=job.slot)
        self.say("written", job.step, seconds=time.perf_counter() - began)
        if rank == 0:
            found = self._publish(store, name, job.extra, lambda: job.step in self.given_up)
            self.say(
                "saved",
                job.step,
                bytes=found.bytes,
                seconds=time.perf_counter() - began,
                where=store.where,
                name=str(name),
            )
            self._prune(store)
        self.memory.saved()
        faults.reach("done")
        if upload is not None:
            self._pending_uploads += 1
            self._uploads.put(upload)

    def _publish(self, store: Store, name: Name, extra: dict[str, Any], hopeless: Callable[[], bool]) -> Found:
        ledger.ensure_claimed(store, self.setup.term, self.setup.from_step)
        _await_parts(store, name, self.setup.world, self.setup.patience_s, hopeless)
        found = complete(store, name, self.setup.world, extra)
        if self.setup.read_back_of(store) == "full":
            self.known_good.setdefault(store.where, set()).add(name)
        return found

    def _prune(self, store: Store) -> None:
        try:
            known_good = self.known_good.setdefault(store.where, set())
            setup = self.setup
            prune(store, setup.keep, setup.keep_every, setup.keep_best, setup.term, known_good)
        except (OSError, ShoalError) as e:  # one too many is no reason to worry anybody but the log
            print(f"shoal: old checkpoints in {store.where} were not deleted: {words_of(e)}", file=sys.stderr)

    def _patiently(self, step: int, work: Callable[[], Done]) -> Done:
        for wait in (BACKOFF_S * 2**i for i in range(TRIES - 1)):
            try:
                return work()
            except (OSError, TransientError) as e:
                self.say("retry", step, error=words_of(e), rank=self.setup.rank)
                time.sleep(wait)
        return work()

    # What is in memory

    def _slices(self, slot: int) -> Iterator[memoryview]:
        at, whole = self.header_bytes, memoryview(self.slots[slot])
        for item in self.contents.items():
            yield whole[at : at + item.bytes]
            at += item.bytes

    def _take_in(self, job: Job) -> Part:
        """Takes the checksums of a snapshot. From then on a restart on this node finds it in memory."""
        header = self.contents.header(Name(job.step, self.setup.term))
        digests = [xxh3_128_hexdigest(data) for data in self._slices(job.slot)]
        size = self.header_bytes + sum(item.bytes for item in self.contents.items())
        file = File(size, self.header_bytes, xxh3_128_hexdigest(header))
        part = part_of(self.setup.rank, self.setup.world, self.contents, digests, file)
        self.memory.keep(Name(job.step, self.setup.term), part, job.extra)
        return part

    def _copy(self, job: Job, part: Part) -> None:
        self.memory.copy(Name(job.step, self.setup.term), part, job.extra, memoryview(self.slots[job.slot]))

    # To the second store

    def _open(self, store: Store, name: Name, part: Part, extra: dict[str, Any]) -> Upload:
        assert isinstance(store, Folder), "what is uploaded was on disk first"
        path = store.path(f"{store.staging(str(name))}/{rank_file(self.setup.rank)}")
        return Upload(name, part, _map(path), extra)

    def _upload_all(self) -> None:
        while (upload := self._uploads.get()) is not None:
            self._pending_uploads -= 1
            wait, began = UPLOAD_BACKOFF_S, time.perf_counter()
            while True:
                try:
                    self._upload(upload, began)
                    break
                except Exception as e:
                    transient = isinstance(e, OSError | TransientError)
                    if not transient or self._superseded():
                        self.say("upload-failed", upload.name.step, error=words_of(e), rank=self.setup.rank)
                        break
                    self.say("upload-retry", upload.name.step, error=words_of(e), rank=self.setup.rank)
                    time.sleep(wait)
                    wait = min(2 * wait, LONGEST_BACKOFF_S)

    def _superseded(self) -> bool:
        return self._pending_uploads > 0

    def _upload(self, upload: Upload, began: float) -> None:
        store, rank = self.second, self.setup.rank
        assert store is not None
        folder = store.staging(str(upload.name))
        store.write(f"{folder}/{rank_file(rank)}", chunks_of(upload.file))
        store.put(f"{folder}/{part_file(rank)}", encode_part(upload.part))
        if rank == 0:
            found = self._publish(store, upload.name, upload.extra, self._superseded)
            seconds = time.perf_counter() - began
            self.say("uploaded", upload.name.step, bytes=found.bytes, seconds=seconds, where=store.where)
            self._prune(store)
        else:
            self.say("sent", upload.name.step)


def _await_parts(store: Store, name: Name, world: int, patience_s: float, hopeless: Callable[[], bool]) -> None:
    folder, deadline, wait = store.staging(str(name)), time.monotonic() + patience_s, 0.01
    wanted = {part_file(rank) for rank in range(world)}
    while missing := wanted - (there := set(store.list(folder))):
        for failed in sorted(entry for entry in there if entry.endswith(".failed")):
            rank = int(failed.removeprefix("rank-").removesuffix(".failed"))
            raise CheckpointError(f"rank {rank}: {store.read(f'{folder}/{failed}').decode()}")
        if hopeless():
            raise CheckpointError("another rank could not write its part; its log says why")
        if time.monotonic() > deadline:
            late = sorted(missing)[0].removesuffix(".json")
            raise CheckpointError(
                f"the part of {late} has not appeared in {store.where} for {patience_s:.0f} s: do all nodes share it?"
            )
        time.sleep(wait)
        wait = min(1.5 * wait, 0.05 if isinstance(store, Folder) else 2.0)


def _tell_rank_0(store: Store, name: Name, rank: int, words: str) -> None:
    """So that it need not wait. On a full disk this fails too; then the trainers pass it on."""
    try:
        store.put(f"{store.staging(str(name))}/rank-{rank:05d}.failed", words.encode())
    except (OSError, ShoalError):
        return


def _map(path: str | os.PathLike[str]) -> mmap.mmap:
    with open(path, "rb") as f:
        return mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)


def chunks_of(file: mmap.mmap) -> Iterator[memoryview]:
    whole = memoryview(file)
    for at in range(0, len(whole), CHUNK_BYTES):
        yield whole[at : at + CHUNK_BYTES]


def main() -> int:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICE)
    first = json.loads(sys.stdin.readline())
    persister = Persister(Setup(**first["setup"]), first["slots"], decode_contents(first["contents"]))
    persister.say("ready", -1)
    for line in sys.stdin:
        persister.take(json.loads(line))
    persister.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())

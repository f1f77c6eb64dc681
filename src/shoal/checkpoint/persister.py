"""The process that writes a rank's snapshots out: `python -m shoal.checkpoint.persister`. No torch here.

It reads JSON lines (the first says where and how, the others what), and answers with JSON lines. It leads a session of
its own and does not hear SIGTERM: when its worker is killed, the save in flight is finished all the same, and then it
ends. Ranks exchange nothing; each writes its file and its part, and rank 0's persister waits until all parts are there.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from xxhash import xxh3_128_hexdigest

from shoal.checkpoint import fault_points, ledger
from shoal.checkpoint.blocks import Digests, file_of
from shoal.checkpoint.error_text import words_of
from shoal.checkpoint.find import Found, Skipped
from shoal.checkpoint.memory.persister_part import InMemory
from shoal.checkpoint.names import Name, part_file, rank_file
from shoal.checkpoint.part import Contents, Part, decode_contents, tell_rank_0, write_known
from shoal.checkpoint.publish import begun, complete, drop_unfinished, prune
from shoal.checkpoint.setup import Setup
from shoal.checkpoint.store import Folder, Store, store_of
from shoal.checkpoint.uploads import Upload, Uploads, chunks_of, open_upload
from shoal.errors import CheckpointError, ShoalError, TransientError

TRIES = 4  # of a local save: after that the next save is the better try
SLOWER = 10  # than rank 0 may another be
LOOK_S = 1.0  # how often whoever waits for other ranks looks whether it should
NICE = 5
# Checksums are taken in pieces with rests between them, half a core: still faster than most disks write. In one go they
# took cores and memory from the disk's driver at the beginning of a save: 4 to 6% of the writing on 2 and on 16 cores.
PIECE_BYTES = 8 << 20
RESTS = 1.0
Done = TypeVar("Done")


class NoPart(CheckpointError):
    """A rank has not written its part."""

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(why)
        self.rank = rank


@dataclass(frozen=True)
class Job:
    step: int
    slot: int
    upload: bool  # to the second store
    extra: dict[str, Any] = field(default_factory=dict)


class Persister:
    def __init__(self, setup: Setup, slots: list[int], contents: Contents, answers: int) -> None:
        """`answers` is the descriptor of the pipe to the worker."""
        self.setup, self.contents, self.answers = setup, contents, answers
        self.header_bytes = len(contents.header(Name(0, 0)))
        self.slots = [mmap.mmap(fd, 0, prot=mmap.PROT_READ) for fd in slots]
        self.first = store_of(setup.stores[0])
        self.given_up: set[int] = set()
        self.known_good: dict[str, set[Name]] = {}
        self._say = threading.Lock()
        self.memory = InMemory(setup, self.say)
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._uploads: Uploads | None = None
        self._newest: Upload | None = None  # of what is on disk, whether or not it is to be copied
        if len(setup.stores) > 1:
            second = store_of(setup.stores[1])
            self._uploads = Uploads(second, self.first, setup.term, self.say, self._publish, self._prune)
        # Snapshots for the memory tier do not wait for a disk: they are what a lost node costs.
        self._snapshots: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, args=(self._jobs, self._save), name="persist"),
            threading.Thread(target=self._work, args=(self._snapshots, self._keep), name="keep"),
        ]
        for thread in self._threads:
            thread.start()

    def take(self, order: dict[str, Any]) -> None:
        if order["do"] == "save":
            self.given_up.discard(order["step"])  # that was an earlier try
            extra = order.get("extra", {})
            queued = self._jobs if order["durable"] else self._snapshots
            queued.put(Job(order["step"], order["slot"], order["upload"], extra))
        elif order["do"] == "upload" and self._uploads is not None:  # nothing is under way now
            if self._newest is not None and self._newest.name.step == order["step"]:
                self._uploads.add(self._newest)
            else:
                self.say("upload-failed", order["step"], error="the persister that wrote it has died")
        elif order["do"] == "give-up":
            self.given_up.add(order["step"])

    def finish(self) -> None:
        """No more orders will come: what has been ordered is done, and then everybody goes."""
        if self._uploads is not None:
            self._uploads.worker_is_gone()
        self._jobs.put(None)
        self._snapshots.put(None)
        for thread in self._threads:
            thread.join()
        if self._uploads is not None:
            self._uploads.finish()

    def say(self, event: str, step: int, **fields: Any) -> None:
        line = json.dumps({"event": event, "step": step, **fields}).encode() + b"\n"
        with self._say, contextlib.suppress(OSError):  # the worker may be gone; the work is worth finishing
            while line:
                line = line[os.write(self.answers, line) :]

    def _work(self, jobs: queue.SimpleQueue[Job | None], do: Callable[[Job], None]) -> None:
        while (job := jobs.get()) is not None:
            try:
                do(job)
            except Exception as e:
                self.say("free", job.step, slot=job.slot)
                kind = "fenced" if isinstance(e, ledger.Fenced) else "failed"
                rank = e.rank if isinstance(e, NoPart) else self.setup.rank
                self.say(kind, job.step, error=words_of(e), rank=rank)

    def _keep(self, job: Job) -> None:
        self._copy(job, self._take_in(job))
        self.say("free", job.step, slot=job.slot)
        self.say("kept", job.step)

    def _save(self, job: Job) -> None:
        began, name, store = time.perf_counter(), Name(job.step, self.setup.term), self.first
        part = self._write(job, name)
        if self._uploads is not None:
            self._newest = open_upload(store, name, part, job.extra)
        self.say("free", job.step, slot=job.slot)
        self.say("written", job.step, seconds=time.perf_counter() - began)
        if self.setup.rank == 0:
            found = self._publish(store, name, job.extra, began, lambda: job.step in self.given_up)
            seconds = time.perf_counter() - began
            self.say("saved", job.step, bytes=found.bytes, seconds=seconds, where=store.where, name=str(name))
            self._prune(store)
        self.memory.saved()
        fault_points.reach("done")
        if job.upload and self._uploads is not None and self._newest is not None:
            self._uploads.add(self._newest)

    def _write(self, job: Job, name: Name) -> Part:
        store, rank = self.first, self.setup.rank
        how = self.setup.read_back_of(store)
        with ThreadPoolExecutor(1, "checksum") as beside:
            part_known = beside.submit(self._take_in, job, RESTS)
            beside.submit(lambda: self._copy(job, part_known.result()))  # the slot is free when it has been sent
            try:
                if rank == 0:
                    _clear(store, name)
                return self._patiently(
                    job.step,
                    lambda: write_known(store, name, rank, chunks_of(self.slots[job.slot]), part_known.result, how),
                )
            except Exception as e:
                with contextlib.suppress(OSError, ShoalError):
                    store.remove(f"{store.staging(str(name))}/{rank_file(rank)}")
                tell_rank_0(store, name, rank, words_of(e))
                raise

    def _publish(
        self, store: Store, name: Name, extra: dict[str, Any], began: float, hopeless: Callable[[], bool]
    ) -> Found:
        """What this rank began to write then. Others may be slower, and as many times slower as it took itself."""
        ledger.ensure_claimed(store, self.setup.term, self.setup.from_step, self.first)
        if not begun(store, name):
            patience_s = self.setup.patience_s + SLOWER * (time.perf_counter() - began)
            _await_parts(store, name, self.setup.world, patience_s, hopeless)
        found = complete(store, name, self.setup.world, extra)
        if self.setup.verifies(store):
            self.known_good.setdefault(store.where, set()).add(name)
        return found

    def _prune(self, store: Store) -> None:
        """One too many is no reason to worry anybody but the log."""
        try:
            known_good = self.known_good.setdefault(store.where, set())
            setup = self.setup
            prune(store, setup.keep, setup.keep_every, setup.keep_best, setup.term, known_good, self._bad)
        except Exception as e:
            print(f"shoal: old checkpoints in {store.where} were not deleted: {words_of(e)}", file=sys.stderr)

    def _bad(self, bad: Skipped) -> None:
        self.say("bad", bad.name.step, error=str(bad))

    def _patiently(self, step: int, work: Callable[[], Done]) -> Done:
        for wait in (self.setup.backoff_s * 2**i for i in range(TRIES - 1)):
            try:
                return work()
            except (OSError, TransientError) as e:
                self.say("retry", step, error=words_of(e), rank=self.setup.rank)
                time.sleep(wait)
        return work()

    # What is in memory

    def _take_in(self, job: Job, rests: float = 0.0) -> Part:
        """Takes the checksums of a snapshot. From then on a restart on this node finds it in memory."""
        header, block_bytes = self.contents.header(Name(job.step, self.setup.term)), self.contents.layout.block_bytes
        size = self.header_bytes + self.contents.data_bytes
        digests = _digests(memoryview(self.slots[job.slot])[self.header_bytes : size], block_bytes, rests)
        file = file_of(size, self.header_bytes, xxh3_128_hexdigest(header), block_bytes, digests)
        part = Part(self.setup.rank, self.setup.world, file, self.contents.packed)
        self.memory.keep(Name(job.step, self.setup.term), part, job.extra)
        return part

    def _copy(self, job: Job, part: Part) -> None:
        self.memory.copy(Name(job.step, self.setup.term), part, job.extra, memoryview(self.slots[job.slot]))


def _digests(data: memoryview, block_bytes: int, rests: float) -> bytes:
    """Rests after each piece, so many times as long as it took."""
    digests = Digests(block_bytes)
    for at in range(0, data.nbytes, PIECE_BYTES):
        began = time.perf_counter()
        digests.update(data[at : at + PIECE_BYTES])
        if rests:
            time.sleep(rests * (time.perf_counter() - began))
    return digests.finish()


def _clear(store: Store, name: Name) -> None:
    """What failed saves have left: it may have filled the disk. And what was said of an earlier try of this one."""
    drop_unfinished(store, name)
    folder = store.staging(str(name))
    for entry in store.list(folder):
        if entry.endswith(".failed"):
            store.remove(f"{folder}/{entry}")


def _await_parts(store: Store, name: Name, world: int, patience_s: float, hopeless: Callable[[], bool]) -> None:
    folder, began, wait, looked = store.staging(str(name)), time.monotonic(), 0.01, 0.0
    wanted = {part_file(rank): rank for rank in range(world)}
    while missing := wanted.keys() - (there := set(store.list(folder))):
        for failed in sorted(entry for entry in there if entry.endswith(".failed")):
            rank = int(failed.removeprefix("rank-").removesuffix(".failed"))
            raise NoPart(rank, store.read(f"{folder}/{failed}").decode())
        late = min(wanted[part] for part in missing)
        if hopeless():
            raise NoPart(late, "it could not write its part; its log says why")
        now = time.monotonic()
        if now - began > patience_s:
            raise NoPart(late, f"its part has not appeared in {store.where} for {patience_s:.0f} s")
        if now - looked > LOOK_S:
            ledger.check_term(store, name.term)  # those who were to write it may be dead, and replaced
            looked = now
        time.sleep(wait)
        wait = min(1.5 * wait, 0.05 if isinstance(store, Folder) else 2.0)


def main() -> int:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICE)
    answers = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever prints, the answers stay JSON
    line = sys.stdin.readline()
    if not line:
        return 0  # the worker has died already
    first = json.loads(line)
    setup = Setup(**first["setup"])
    persister = Persister(setup, first["slots"], decode_contents(first["contents"], setup.world), answers)
    persister.say("ready", -1)
    for line in sys.stdin:
        persister.take(json.loads(line))
    persister.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())

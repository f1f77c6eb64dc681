"""A rank's saves in the background: the trainer's side.

    saver = Saver(setup, tensors, holders)
    saver.begin(step, tensors, extra)     copies the state; the persister process does the rest
    saver.settle()                        before the state changes
    for event in saver.poll(): …          what has become of it
    saver.wait_for(step)                  until it is on disk, or has failed

What a rank may do next depends on its own slots; that all ranks do the same is the caller's (`shoal.train.saves`).
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint import fault_points
from shoal.checkpoint.layout import Holders, local_of
from shoal.checkpoint.names import Name
from shoal.checkpoint.part import encode_contents
from shoal.checkpoint.rows import PIECE_BYTES
from shoal.checkpoint.saving import Tensors, contents_of
from shoal.checkpoint.setup import Setup
from shoal.checkpoint.slot import Slot
from shoal.checkpoint.snapshot import Snapshots

RESTARTS = 3  # of a persister that dies, for one save
TICK_S = 0.005


@dataclass(frozen=True)
class Event:
    """What it said: kept, written, saved, failed, fenced, retry; sent, uploaded, upload-retry, upload-failed."""

    kind: str
    step: int
    fields: dict[str, Any]

    @property
    def error(self) -> str:
        return str(self.fields.get("error", ""))


class Saver:
    def __init__(
        self,
        setup: Setup,
        tensors: Tensors,
        holders: Holders | None = None,
        slots: int = 1,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        """Reserves the memory, which takes a moment: before the training and not in its midst."""
        self.setup = setup
        contents = contents_of(tensors, holders, piece_bytes)
        size = len(contents.header(Name(0, 0))) + contents.data_bytes
        self.bytes = size
        self.in_memory = setup.memory is not None
        self.slots = self._reserve(slots, size)
        device = next((local_of(t).device for t in tensors.values()), torch.device("cpu"))
        self._snapshots = Snapshots(contents, self.slots, device)
        self._contents = encode_contents(contents)
        self._filling: tuple[int, dict[str, Any]] | None = None  # (slot, order) whose copies are under way
        self._ordered: dict[int, tuple[int, dict[str, Any]]] = {}  # slot → (deaths of the persister, order)
        self._durable: int | None = None  # the step that is being written
        self._given_up: int | None = None
        self._uploading: set[int] = set()  # steps that are on their way to the second store
        self._uploaded = -1  # the newest that was ordered to go there
        self._buffer = b""
        self._events: list[Event] = []
        self._process = self._start()

    # What the trainer asks and does

    @property
    def free(self) -> bool:
        """Whether a snapshot could be taken now: where there are three slots, while at most one is not written, or not
        copied to the next node yet. With two, some rank's newest copy could be older than all that another rank has,
        and a lost node would leave no snapshot that is whole."""
        return self._filling is None and sum(slot.busy for slot in self.slots) <= max(0, len(self.slots) - 2)

    @property
    def saving(self) -> int | None:
        """The step whose save is under way."""
        return self._durable

    @property
    def uploading(self) -> bool:
        """Whether a save that is done is on its way to the second store."""
        return bool(self._uploading)

    def begin(
        self, step: int, tensors: Tensors, extra: dict[str, Any], durable: bool = True, upload: bool = True
    ) -> float:
        """Takes a snapshot, into the slot with the oldest; returns the seconds that it held up the trainer.

        `upload`: to the second store, once it is on disk. All ranks must say the same.
        """
        began = time.perf_counter()
        self._hand_over(wait=True)
        while not (choice := [i for i, slot in enumerate(self.slots) if not slot.busy]):
            self._events = self.poll()  # a persister has died and another takes over; else there is one
            time.sleep(TICK_S)
        index = min(choice, key=lambda i: self.slots[i].name or Name(-1, 0))
        fault_points.reach("snapshot")
        self.slots[index].begin()
        self._snapshots.fill(index, Name(step, self.setup.term), tensors)
        upload = upload and durable and len(self.setup.stores) > 1
        order = {"do": "save", "step": step, "slot": index, "durable": durable, "upload": upload}
        self._filling = (index, order | ({"extra": extra} if self.setup.rank == 0 else {}))
        if durable:
            self._durable, self._given_up = step, None
        if upload:
            self._uploaded = step
            self._uploading.add(step)
        self._hand_over()
        return time.perf_counter() - began

    def upload(self, step: int) -> None:
        """The newest save, which is done, goes to the second store if it was not to go there. All ranks."""
        if len(self.setup.stores) > 1 and step != self._uploaded:
            self._uploaded = step
            self._uploading.add(step)
            self._send({"do": "upload", "step": step})

    def settle(self) -> None:
        """Before the state changes."""
        self._snapshots.settle()
        self._hand_over()  # on a CPU the copies are made by now; `poll` may be a long step away

    def give_up(self, step: int) -> None:
        """Rank 0: another rank cannot write its part."""
        self._given_up = step
        self._send({"do": "give-up", "step": step})

    def poll(self) -> list[Event]:
        """What has happened since the last call. Never waits."""
        self._hand_over()
        self._read()
        if self._process.poll() is not None:
            self._persister_died()
        events, self._events = self._events, []
        return events

    def wait_for(self, step: int, kinds: Sequence[str], timeout_s: float) -> list[Event]:
        """Polls until one of these is said of the step, or time is up; all events until then."""
        events: list[Event] = []
        deadline = time.monotonic() + timeout_s
        self._hand_over(wait=True)
        while time.monotonic() < deadline:
            events += self.poll()
            if any(e.step == step and e.kind in kinds for e in events):
                break
            time.sleep(TICK_S)
        return events

    def close(self, forget: bool = True, timeout_s: float = 10.0) -> None:
        """The persister finishes what it has been told and goes. `forget`: what is in memory is not needed any more;
        else nobody waits for it, and what it has not finished can be found there."""
        self._hand_over(wait=forget)
        with contextlib.suppress(OSError):
            self._stdin.close()
        if forget:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(
                    0 if self.uploading else timeout_s
                )  # copies are made from the disk, with or without us
            self._stdout.close()
            self._snapshots.close()
            for slot in self.slots:
                slot.close()

    def release(self) -> None:
        """After `close` without `forget`, in a process that goes on: gives back its own hold on the memory. What is in
        it can be found until somebody takes it away."""
        self._stdout.close()
        self._snapshots.close()
        for slot in self.slots:
            os.close(slot.fd)

    # With the persister

    def _hand_over(self, wait: bool = False) -> None:
        """Tells the persister of a snapshot once its copies have arrived."""
        if self._filling is None:
            return
        if wait:
            self._snapshots.wait()
        if self._snapshots.copied:
            (index, order), self._filling = self._filling, None
            self.slots[index].seal(Name(order["step"], self.setup.term))
            fault_points.reach("snapshot-done")
            self._ordered[index] = (0, order)
            self._send(order)

    def _send(self, order: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has died; `poll` finds out and starts another
            self._stdin.write(json.dumps(order).encode() + b"\n")
            self._stdin.flush()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._stdout.fileno(), 1 << 16)
            except BlockingIOError:
                return
            if not data:
                return
            self._buffer += data
            *lines, self._buffer = self._buffer.split(b"\n")
            for line in lines:
                self._hear(json.loads(line))

    def _hear(self, said: dict[str, Any]) -> None:
        kind, step = said.pop("event"), said.pop("step")
        if kind == "free":
            slot = self.slots[said["slot"]]
            if slot.name == Name(step, self.setup.term):  # else it holds another one by now
                slot.busy = False
            return
        if kind in ("kept", "saved" if self.setup.rank == 0 else "written", "failed", "fenced"):  # its last word
            self._ordered = {i: (n, order) for i, (n, order) in self._ordered.items() if order["step"] != step}
            if step == self._durable:
                self._durable = None
        if kind in ("sent", "uploaded", "upload-failed", "failed", "fenced"):
            self._uploading.discard(step)
        if kind != "ready":
            self._events.append(Event(kind, step, said))

    def _persister_died(self) -> None:
        """Another one takes over what was ordered, as long as the snapshot is still there. Where nothing was, the next
        order finds out."""
        self._read()
        code = self._process.returncode
        how = f"the persister ended with {'signal ' + str(-code) if code < 0 else 'exit code ' + str(code)}"
        for slot in self.slots:
            slot.busy = slot.busy and self._filling is not None and slot is self.slots[self._filling[0]]
        again, self._ordered = self._ordered, {}
        waiting = {order["step"] for _, order in again.values()} | ({self._durable} - {None})
        for step in sorted(self._uploading - waiting):
            self._uploading.discard(step)
            self._events.append(Event("upload-failed", step, {"error": how, "rank": self.setup.rank}))
        if not again:
            return
        with contextlib.suppress(OSError):  # what it has not read of its orders
            self._stdin.close()
        self._stdout.close()
        self._process = self._start()
        for index, (deaths, order) in again.items():
            slot, step = self.slots[index], order["step"]
            if deaths < RESTARTS and slot.name == Name(step, self.setup.term) and step != self._given_up:
                self._events.append(Event("retry", step, {"error": how, "rank": self.setup.rank}))
                slot.busy = True
                self._ordered[index] = (deaths + 1, order)
                self._send(order)
            else:
                error = f"{how}, {deaths + 1} times" if deaths else how
                self._hear({"event": "failed", "step": step, "error": error, "rank": self.setup.rank})

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", "shoal.checkpoint.persister"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            pass_fds=[slot.fd for slot in self.slots],  # not by name: they are renamed with every snapshot
            env=os.environ | {"RANK": str(self.setup.rank)},
        )
        assert process.stdin is not None
        assert process.stdout is not None
        self._stdin, self._stdout = process.stdin, process.stdout
        self._buffer = b""
        os.set_blocking(self._stdout.fileno(), False)
        setup = asdict(self.setup) | {"memory": self.setup.memory if self.in_memory else None}
        self._send({"setup": setup, "slots": [slot.fd for slot in self.slots], "contents": self._contents})
        return process

    def _reserve(self, count: int, size: int) -> list[Slot]:
        slots: list[Slot] = []
        if self.setup.memory is not None:
            try:
                while len(slots) < count:
                    slots += [Slot.create(Path(self.setup.memory), self.setup.rank, len(slots), size)]
                return slots
            except OSError:
                for slot in slots:
                    slot.close()
        self.in_memory = False
        return [Slot.anonymous(self.setup.rank, index, size) for index in range(count)]

"""Shoal's own ways to save, as rivals: with the settings that a run has when its file says nothing about them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from benchmarks.checkpointing.rivals import Rival, Tensors

from shoal import checkpoint
from shoal.checkpoint import ledger
from shoal.checkpoint.memory import ram
from shoal.checkpoint.names import Name
from shoal.checkpoint.saver import Saver
from shoal.checkpoint.setup import Setup
from shoal.checkpoint.store import Folder

TERM = 1
NO_CHECKSUMS = Path(__file__).resolve().parent / "no_checksums"


class Synchronous(Rival):
    """`background: false`."""

    def begin(self, step: int) -> None:
        checkpoint.save(self.folder(step), step, self.state, {}, TERM, read_back="full")
        self.durable_at = time.perf_counter()

    def load(self, step: int) -> None:
        assert checkpoint.restore(self.folder(step), self.state) is not None


class Background(Rival):
    """The default. Its retention goes on meanwhile, and what it has written it reads again."""

    background = True

    def __init__(self, name: str, root: Path, state: Tensors, memory: Path, checksums: bool = True) -> None:
        super().__init__(name, root, state)
        self._store, self._hold = Folder(self.folder(0)), ram.hold(memory)
        setup = Setup(dist.get_rank(), dist.get_world_size(), TERM, -1, (self._store.where,), str(memory), keep=1)
        with _environment(PYTHONPATH=os.environ["PYTHONPATH"] if checksums else _first(NO_CHECKSUMS)):
            self._saver = Saver(setup, state)

    def begin(self, step: int) -> None:
        self._saver.begin(step, self.state, {})

    def before_update(self) -> None:
        self._saver.settle()

    def done(self) -> bool:
        for event in self._saver.poll():
            assert event.kind in ("written", "saved"), f"{event.kind}: {event.error}"
            if event.kind == "saved":
                # The persister does not say when; the last thing that it has written does.
                entry = self._store.path(f"{ledger.LEDGER}/published-{Name(event.step, TERM)}.json")
                self.durable_at = entry.stat().st_mtime - time.time() + time.perf_counter()
        return self._saver.saving is None

    def finish(self) -> None:
        while not self.done():
            time.sleep(0.002)

    def load(self, step: int) -> None:
        found = checkpoint.restore(self._store, self.state)
        assert found is not None
        assert found.step == step

    def folder(self, step: int) -> Path:
        return self.root / self.name.replace(" ", "-")  # one store for all steps, as in a run

    def discard(self, step: int) -> None:
        """Its own retention has done so."""

    def close(self) -> None:
        self._saver.close()
        self._hold.close()


def _first(folder: Path) -> str:
    return f"{folder}{os.pathsep}{os.environ['PYTHONPATH']}"


@contextmanager
def _environment(**changes: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)

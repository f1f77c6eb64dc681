"""What is compared: each way to save is begun, waited for before the update, and done at some time later."""

from __future__ import annotations

import abc
import os
import shutil
import time
import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from shoal.checkpoint.layout import local_of

Tensors = Mapping[str, torch.Tensor]


class Rival(abc.ABC):
    """A way to save. Synchronous ones do everything in `begin`."""

    background = False

    def __init__(self, name: str, root: Path, state: Tensors) -> None:
        self.name, self.root, self.state = name, root, state
        self.durable_at = 0.0  # time.perf_counter() at which this process knew the last save to be on disk

    @abc.abstractmethod
    def begin(self, step: int) -> None:
        """The training thread asks for a save of the state as it is now."""

    def before_update(self) -> None:
        """The training thread is about to change the state: waits until it may."""
        return

    def done(self) -> bool:
        """Whether the save that was begun last is on disk, as far as this process knows. Never waits."""
        return True

    def finish(self) -> None:
        """Waits until it is."""
        return

    @abc.abstractmethod
    def load(self, step: int) -> None:
        """Fills the state in place. Collective."""

    def discard(self, step: int) -> None:
        """Deletes a save that is not needed any more. One process calls it, when nothing is measured."""
        shutil.rmtree(self.folder(step), ignore_errors=True)

    def close(self) -> None:
        """Frees memory and ends processes."""
        return

    def folder(self, step: int) -> Path:
        return self.root / f"{self.name.replace(' ', '-').replace(',', '')}-{step}"


class TorchSave(Rival):
    """Each process pickles its own tensors into a file of its own."""

    def __init__(self, name: str, root: Path, state: Tensors, fsync: bool) -> None:
        super().__init__(name, root, state)
        self._fsync = fsync

    def begin(self, step: int) -> None:
        self.folder(step).mkdir(parents=True, exist_ok=True)
        with open(self._file(step), "wb") as f:
            torch.save({name: local_of(t) for name, t in self.state.items()}, f)
            if self._fsync:
                f.flush()
                os.fsync(f.fileno())
        dist.barrier()  # a checkpoint is there when all of it is
        self.durable_at = time.perf_counter()

    def load(self, step: int) -> None:
        device = next(iter(self.state.values())).device
        loaded = torch.load(self._file(step), map_location=device, weights_only=True)
        for name, tensor in self.state.items():
            local_of(tensor).copy_(loaded[name])
        dist.barrier()

    def _file(self, step: int) -> Path:
        return self.folder(step) / f"rank-{dist.get_rank()}.pt"


class Dcp(Rival):
    """torch.distributed.checkpoint with what its documentation has to make it fast.

    One file a writer thread and not one a tensor, the plan cached from the second save on, a group of its own for its
    collectives, one stager for all saves (its memory is taken once), and files that are fsync'd.
    """

    def __init__(
        self,
        name: str,
        root: Path,
        state: Tensors,
        group: dist.ProcessGroup,
        kind: AsyncCheckpointerType | None = None,
        stager: DefaultStager | None = None,
    ) -> None:
        super().__init__(name, root, state)
        self.background = kind is not None
        self._group, self._kind, self._stager = group, kind, stager
        self._staged: Future[Any] | None = None
        self._uploaded: Future[Any] | None = None

    def begin(self, step: int) -> None:
        # Half of the cores write, as each writer both pickles and waits for the disk; on 2 cores 1 to 4 were alike.
        threads = max(2, len(os.sched_getaffinity(0)) // dist.get_world_size() // 2)
        how: dict[str, Any] = {
            "storage_writer": dcp.FileSystemWriter(self.folder(step), thread_count=threads),
            "planner": dcp.DefaultSavePlanner(enable_plan_caching=True),
            "process_group": self._group,
        }
        if self._kind is None:
            dcp.save(dict(self.state), **how)
            self.durable_at = time.perf_counter()
            return
        response = dcp.async_save(
            dict(self.state), async_checkpointer_type=self._kind, async_stager=self._stager, **how
        )
        self._staged = getattr(response, "staging_completion", None)
        self._uploaded = getattr(response, "upload_completion", response)
        self._uploaded.add_done_callback(self._note)

    def before_update(self) -> None:
        if self._staged is not None:
            self._staged.result()
            self._staged = None

    def done(self) -> bool:
        return self._uploaded is None or self._uploaded.done()

    def finish(self) -> None:
        self.before_update()
        if self._uploaded is not None:
            self._uploaded.result()

    def load(self, step: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(
                dict(self.state), storage_reader=dcp.FileSystemReader(self.folder(step)), process_group=self._group
            )

    def _note(self, _: Future[Any]) -> None:
        self.durable_at = time.perf_counter()


class Stagers:
    """One for each way to stage, shared by the rivals that stage alike: 15 GB of pinned memory are taken once."""

    def __init__(self, device: str) -> None:
        cuda = device == "cuda"
        # Pinned memory and copies that do not block need a GPU; shared memory is what a second process needs.
        self.blocking = _Kept(StagingOptions(cuda, True, False, cuda))
        self.overlapped = _Kept(StagingOptions(cuda, True, True, cuda))

    def close(self) -> None:
        self.blocking.free()
        self.overlapped.free()


class _Kept(DefaultStager):
    """torch 2.11 throws a stager's memory away after each save (2.13 does not), and the next one fails."""

    def __init__(self, options: StagingOptions) -> None:
        super().__init__(options)
        self._state_dict_stager.close = lambda: None

    def free(self) -> None:
        del self._state_dict_stager.close
        self.close()


def dcp_rivals(root: Path, state: Tensors, stagers: Stagers) -> list[Rival]:
    group = dist.new_group(backend="gloo")
    thread, process = AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS
    return [
        Dcp("DCP", root, state, group),
        Dcp("DCP thread", root, state, group, thread, stagers.blocking),
        Dcp("DCP thread, overlapped", root, state, group, thread, stagers.overlapped),
        Dcp("DCP process", root, state, group, process, stagers.blocking),
        Dcp("DCP process, overlapped", root, state, group, process, stagers.overlapped),
    ]

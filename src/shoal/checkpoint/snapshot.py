"""Copies a rank's state into a slot of memory, in a thread, while training goes on.

Forward and backward passes only read the weights and never touch the optimizer's state, so that the copies may take
until the next update; `settle` waits there for what is left of them. Where that is nothing, a save holds up training
for well under a millisecond. On a GPU the copies are queued on a stream of their own, into pinned memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from shoal.checkpoint.layout import TORCH_DTYPES, local_of, view_of
from shoal.checkpoint.names import Name
from shoal.checkpoint.part import Contents
from shoal.checkpoint.slot import Slot

Tensors = Mapping[str, torch.Tensor]


class Snapshots:
    """Fills slots with the state of this rank."""

    def __init__(self, contents: Contents, slots: list[Slot], device: torch.device) -> None:
        self.contents, self.slots = contents, slots
        self._places = [_places(contents, slot) for slot in slots]
        self._thread = ThreadPoolExecutor(1, "shoal-snapshot")
        self._filled: Future[None] | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._event: torch.cuda.Event | None = None  # after the last copy
        if self._stream is not None:
            for slot in slots:
                _pin(slot)

    def fill(self, index: int, name: Name, tensors: Tensors) -> None:
        """Begins to copy the state as it is now. What is wrong with it is raised by `settle` or `wait`."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        self._filled = self._thread.submit(self._fill, index, name, tensors)

    @property
    def copied(self) -> bool:
        """Whether the last fill has arrived in memory; raises what was wrong with it."""
        if self._filled is None:
            return True
        if not self._filled.done():
            return False
        self._filled.result()
        return self._event is None or self._event.query()

    def settle(self) -> None:
        """Before the state changes: the copies are made, or what is queued on the GPU after this waits for them."""
        if self._filled is not None:
            self._filled.result()
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)

    def wait(self) -> None:
        if self._filled is not None:
            self._filled.result()
        if self._event is not None:
            self._event.synchronize()

    def close(self) -> None:
        self.wait()
        self._thread.shutdown()
        self._places.clear()  # they are views of the slots' memory
        if self._stream is not None:
            for slot in self.slots:
                _unpin(slot)

    @torch.no_grad()
    def _fill(self, index: int, name: Name, tensors: Tensors) -> None:
        header = self.contents.header(name)
        self.slots[index].map[: len(header)] = header
        locals_ = {name: local_of(tensors[name]) for name in {piece.tensor for piece in self.contents.pieces}}
        sources = [view_of(locals_[piece.tensor], piece.start, piece.shape) for piece in self.contents.pieces]
        # One call for all: a loop here would ask for the interpreter's lock at each tensor, which training needs too.
        with torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext():
            if sources:
                torch._foreach_copy_(self._places[index], sources, non_blocking=self._stream is not None)
            if self._stream is not None:
                self._event = torch.cuda.Event()
                self._event.record()


def _places(contents: Contents, slot: Slot) -> list[torch.Tensor]:
    """Each piece's place in the slot, as a tensor."""
    whole = torch.frombuffer(slot.map, dtype=torch.uint8)
    at = len(contents.header(Name(0, 0)))
    places = []
    for piece, item in zip(contents.pieces, contents.items, strict=True):
        dtype = TORCH_DTYPES[contents.layout.tensors[piece.tensor].dtype]
        places.append(whole[at : at + item.bytes].view(dtype).view(piece.shape))
        at += item.bytes
    return places


def _pin(slot: Slot) -> None:
    whole = torch.frombuffer(slot.map, dtype=torch.uint8)
    torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), whole.numel(), 0)))


def _unpin(slot: Slot) -> None:
    whole = torch.frombuffer(slot.map, dtype=torch.uint8)
    with contextlib.suppress(RuntimeError):
        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(whole.data_ptr())))

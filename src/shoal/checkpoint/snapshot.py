"""Copies a rank's state into a slot of memory: the only part of a save that training waits for.

On a CPU it is a copy into pages that are there already. On a GPU the copies are queued on a stream of their own into
pinned memory and training goes on at once: forward and backward passes only read the weights, and `settle` makes the
GPU (not this process) wait before they are changed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import torch

from shoal.checkpoint.layout import TORCH_DTYPES, Held, local_of, view_of
from shoal.checkpoint.names import Name
from shoal.checkpoint.part import Contents
from shoal.checkpoint.slot import Slot

Tensors = Mapping[str, torch.Tensor]


class Snapshots:
    """Fills slots with the state of this rank."""

    def __init__(self, contents: Contents, boxes: list[Held], slots: list[Slot], device: torch.device) -> None:
        self.contents, self.boxes, self.slots = contents, boxes, slots
        self._places = [_places(contents, slot) for slot in slots]
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._event: torch.cuda.Event | None = None
        if self._stream is not None:
            for slot in slots:
                _pin(slot)

    def fill(self, index: int, name: Name, tensors: Tensors) -> None:
        slot = self.slots[index]
        header = self.contents.header(name)
        slot.map[: len(header)] = header
        if self._stream is None:
            self._copy(index, tensors, non_blocking=False)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._copy(index, tensors, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def copied(self) -> bool:
        """Whether the last fill has arrived in memory."""
        return self._event is None or self._event.query()

    def settle(self) -> None:
        """Before the state changes: what is queued after this waits for the copies."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def close(self) -> None:
        self.wait()
        self._places.clear()  # they are views of the slots' memory
        if self._stream is not None:
            for slot in self.slots:
                _unpin(slot)

    @torch.no_grad()
    def _copy(self, index: int, tensors: Tensors, non_blocking: bool) -> None:
        locals_ = {name: local_of(tensors[name]) for name in {piece.tensor for piece in self.contents.pieces}}
        for piece, box, place in zip(self.contents.pieces, self.boxes, self._places[index], strict=True):
            place.copy_(view_of(locals_[piece.tensor], box.start, box.shape), non_blocking=non_blocking)


def _places(contents: Contents, slot: Slot) -> list[torch.Tensor]:
    """Each piece's place in the slot, as a tensor."""
    whole = torch.frombuffer(slot.map, dtype=torch.uint8)
    at = len(contents.header(Name(0, 0)))
    places = []
    for piece, item in zip(contents.pieces, contents.items(), strict=True):
        dtype = TORCH_DTYPES[contents.entries[piece.tensor].dtype]
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

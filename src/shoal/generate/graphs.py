"""Decode steps as CUDA graphs, one for each size of a batch, from the last tokens to the next ones.

A step of a small model is hundreds of kernels of some microseconds, which a host cannot start as fast as they end; a
graph starts them all. The tokens are picked in it and stay on the device, so the host may ask for the next step before
it has read this one's tokens.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal import kernels
from shoal.generate.asked import NOBODY, POSITION, SEAT, TOKEN, picked_plainly, row_asked
from shoal.generate.joined import Joined, fits, runs_here
from shoal.generate.paged import Paged, Seat
from shoal.generate.request import Sampling
from shoal.kernels import decode_pick
from shoal.kernels.paged_decode import Pages, Room
from shoal.model.decoder import Decoder
from shoal.model.moe import MixtureOfExperts, has_grouped

LOG = logging.getLogger(__name__)
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
AHEAD = 4  # steps that the host may be ahead: so many buffers it writes to


@dataclass
class Drawn:
    """Tokens that are being picked."""

    runner: Graphed
    seats: Sequence[Seat]
    told: Tensor
    ready: Any

    def read(self) -> list[tuple[int, float]]:
        """Of each seat the token and its log-probability; -1 where the logits were not finite. Waits for the device."""
        if self.ready is not None:
            self.ready.synchronize()
        found = [(int(token), logprob) for token, logprob in self.told.tolist()]
        for seat, (token, _) in zip(self.seats, found, strict=True):
            self.runner.learned(seat, token)
        return found


@dataclass
class Sent:
    """Memory that the device copies from."""

    asked: Tensor
    tables: Tensor
    copied: Any  # an event; None on a processor


@dataclass
class Step:
    """One size: where its input is read from and its output stands."""

    asked: Tensor
    tables: Tensor
    room: Room
    run: Callable[[], None]
    logits: Tensor | None = None
    told: Tensor | None = None
    listed: tuple[tuple[int, int, int], ...] = ()  # seats and how many blocks they had when the tables were written


class Graphed(Paged):
    """A `Runner` that also picks (`draw`)."""

    def __init__(
        self,
        model: Decoder,
        places: int,
        context: int,
        kv_bytes: int | None = None,
        exact: bool = False,
        reuse: bool = True,
        vocabulary: int | None = None,
        eight_bits: bool = False,
    ) -> None:
        """`vocabulary`: so many tokens may be drawn. `exact`: the model is in that mode (`shoal.model.exact`)."""
        joins = fits(model) and runs_here(model) and not exact
        self.joined = Joined(model, context, eight_bits) if joins else None
        super().__init__(model, places, context, kv_bytes, exact, reuse)
        self.vocabulary = min(vocabulary or model.shape.vocab_size, model.shape.vocab_size)
        self._pages = [Pages(k, v) for k, v in zip(self.keys, self.values, strict=True)]
        self._last = torch.zeros(places + 1, dtype=torch.int32, device=self.device)
        self._steps: dict[int, Step] = {}
        self._sizes = [size for size in SIZES if size < places] + [places]
        self._pool: Any = None
        self._captures = self.device.type == "cuda" and runs_here(model) and self._captured_experts()
        self._turn = 0
        self._pinned: dict[int, list[Sent]] = {}
        self._known: dict[int, deque[int]] = {}  # by seat: tokens that were picked and read, and not yet taken in
        self._taken: dict[int, int] = {}  # and how many were taken in before they were read

    def admit(self, tokens: Sequence[int], most: int, version: str) -> Seat | None:
        seat = super().admit(tokens, most, version)
        if seat is not None:
            self._known[seat.number], self._taken[seat.number] = deque(), 0
        return seat

    @torch.no_grad()
    def decode(self, seats: Sequence[Seat], tokens: Sequence[int]) -> Tensor:
        """As `Paged.decode`. The logits are overwritten by the next step."""
        greedy = Sampling(temperature=0.0)
        step = self._launch(seats, tokens, [greedy] * len(seats), [0] * len(seats))
        for seat in seats:
            self._known[seat.number].clear()
            self._taken[seat.number] = 0
        assert step.logits is not None
        return step.logits[: len(seats)]

    @torch.no_grad()
    def draw(
        self, seats: Sequence[Seat], tokens: Sequence[int | None], samplings: Sequence[Sampling], drawn: Sequence[int]
    ) -> Drawn:
        """One more token each, picked on the device. A token None is the one that was picked for the seat last, read or
        not. `drawn`: so many of the answer were picked before."""
        step = self._launch(seats, tokens, samplings, drawn)
        assert step.told is not None
        return self._telling(seats, step.told[: len(seats)])

    @torch.no_grad()
    def first(self, seat: Seat, logits: Tensor, sampling: Sampling) -> Drawn:
        """As `draw`, by logits that are there: [1, vocab], the last of a prompt."""
        asked = torch.tensor([row_asked(sampling, seat.length, -1, seat.number, 0)], dtype=torch.float64)
        return self._telling([seat], self._picked(logits, asked.to(self.device)))

    def _telling(self, seats: Sequence[Seat], told: Tensor) -> Drawn:
        if self.device.type != "cuda":
            return Drawn(self, list(seats), told.clone(), None)
        there = torch.empty(told.shape, dtype=told.dtype, pin_memory=True)
        there.copy_(told, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record()
        return Drawn(self, list(seats), there, ready)

    def learned(self, seat: Seat, token: int) -> None:
        """What was picked for it. Its block is told when it has been taken in."""
        if seat.closed:
            return
        if self._taken[seat.number]:
            self._taken[seat.number] -= 1
            self.blocks.wrote(seat.held, [max(token, 0)])
        else:
            self._known[seat.number].append(token)

    def warm_up(self) -> None:
        """Captures all sizes now, the largest first, so that they share their memory."""
        for size in reversed(self._sizes):
            self._step(size)

    def _launch(
        self, seats: Sequence[Seat], tokens: Sequence[int | None], samplings: Sequence[Sampling], drawn: Sequence[int]
    ) -> Step:
        size = next(size for size in self._sizes if size >= len(seats))
        step = self._step(size)
        self._turn = (self._turn + 1) % AHEAD
        sent = self._host(size)[self._turn]
        if sent.copied is not None:
            sent.copied.synchronize()
        rows = []
        for seat, token, sampling, count in zip(seats, tokens, samplings, drawn, strict=True):
            self.blocks.grow(seat.held, seat.length + 1)
            rows.append(row_asked(sampling, seat.length, -1 if token is None else token, seat.number, count))
            seat.length += 1
            self._take_in(seat, token)
        rows += [NOBODY] * (size - len(seats))
        sent.asked.copy_(torch.tensor(rows, dtype=torch.float64))
        step.asked.copy_(sent.asked, non_blocking=True)
        listed = tuple((seat.number, id(seat.held), len(seat.held.blocks)) for seat in seats)
        if listed != step.listed:
            for row, seat in zip(sent.tables, seats, strict=False):
                row[: len(seat.held.blocks)] = torch.tensor(seat.held.blocks, dtype=torch.int32)
            step.tables.copy_(sent.tables, non_blocking=True)
            step.listed = listed
        if sent.copied is not None:
            sent.copied.record()
        step.run()
        return step

    def _take_in(self, seat: Seat, token: int | None) -> None:
        if token is not None:
            self.blocks.wrote(seat.held, [token])
            if self._known[seat.number]:
                self._known[seat.number].popleft()
        elif self._known[seat.number]:
            self.blocks.wrote(seat.held, [max(self._known[seat.number].popleft(), 0)])
        else:
            self._taken[seat.number] += 1

    def _host(self, size: int) -> list[Sent]:
        """In turns: the device may still copy from that of the step before."""
        if size not in self._pinned:
            pin = self.device.type == "cuda"
            self._pinned[size] = [
                Sent(
                    torch.empty(size, decode_pick.COLUMNS, dtype=torch.float64, pin_memory=pin),
                    torch.zeros(size, self.wide, dtype=torch.int32, pin_memory=pin),
                    torch.cuda.Event() if pin else None,
                )
                for _ in range(AHEAD)
            ]
        return self._pinned[size]

    def _step(self, size: int) -> Step:
        if size not in self._steps:
            self._steps[size] = self._made(size)
        return self._steps[size]

    def _made(self, size: int) -> Step:
        asked = torch.tensor([NOBODY] * size, dtype=torch.float64).to(self.device)
        tables = torch.zeros(size, self.wide, dtype=torch.int32, device=self.device)
        room = self.room(size)
        assert isinstance(room, Room)
        step = Step(asked, tables, room, lambda: None)

        def once() -> None:
            step.logits, step.told = self._computed(step)

        step.run = once
        if not self._captures:
            return step
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.no_grad(), torch.cuda.stream(stream):
            once()  # kernels are compiled, libraries opened
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph, pool=self._pool):
            once()
        self._pool = graph.pool()
        step.run = graph.replay
        return step

    def _computed(self, step: Step) -> tuple[Tensor, Tensor]:
        shape = self.model.shape
        if self.joined is not None:
            x, positions = decode_pick.begin(step.asked, self._last, self.model.embed.weight, self.model.embed_scale)
            logits = self.joined(x, self._pages, step.tables, positions, step.room)
        else:
            given, seats = step.asked[:, TOKEN], step.asked[:, SEAT].long()
            ids = torch.where(given < 0, self._last[seats].double(), given).clamp(min=0).long()
            logits = self.step(ids[:, None], step.tables, step.asked[:, POSITION].int())
        assert logits.shape[1] == shape.vocab_size
        return logits, self._picked(logits, step.asked)

    def _picked(self, logits: Tensor, asked: Tensor) -> Tensor:
        picked = decode_pick.pick if kernels.fit((logits,)) else picked_plainly
        return picked(logits, asked, self._last, self.vocabulary)

    def _captured_experts(self) -> bool:
        for block in self.model.blocks.values():
            if isinstance(block.ffn, MixtureOfExperts):
                gate = block.ffn.experts.gate
                if self.exact:
                    return False  # their products are of so many rows as tokens came, which the host must know
                if not has_grouped(gate.new_empty(1, gate.shape[2]), gate):
                    LOG.warning("experts of %s are computed one by one here: decoding is not captured.", gate.dtype)
                    return False
        return True

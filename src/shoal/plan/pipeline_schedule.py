"""Plays a pipeline's schedule, micro-batch by micro-batch: when is the last one done?

A device does its work in the order that its schedule lays down, and each piece as soon as the device is free and what
the piece needs has come from its neighbour. Where a backward pass is split (zbv), the gradient of the input is computed
and handed on first, and those of the weights when the schedule says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from shoal.errors import SpecError
from shoal.spec.stages import stages_of

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zbv")
FORWARD, BACKWARD, WEIGHTS = "F", "B", "W"

Piece = tuple[str, int, int]  # what, which stage, which micro-batch


@dataclass(frozen=True)
class Played:
    seconds: float
    busy: tuple[float, ...]  # seconds that each device worked
    under_way: tuple[int, ...]  # most micro-batches, over all its stages, whose activations a device held

    @property
    def idle(self) -> float:
        """Of the devices' time, what they waited."""
        return 1 - sum(self.busy) / (self.seconds * len(self.busy))


def play(
    schedule: str,
    devices: int,
    micro_batches: int,
    forward: Sequence[float],
    backward: Sequence[float],
    handover: float = 0.0,
) -> Played:
    """`forward`, `backward`: seconds of a micro-batch in each stage (two stages a device in the last two schedules)."""
    return _play(schedule, devices, micro_batches, tuple(forward), tuple(backward), handover)


@lru_cache(maxsize=4096)
def _play(
    schedule: str, devices: int, count: int, forward: tuple[float, ...], backward: tuple[float, ...], handover: float
) -> Played:
    left_to_do = [list(order) for order in orders(schedule, devices, count)]
    home = {stage: device for device in range(devices) for stage in stages_of(device, devices, schedule)}
    halved, frees = (2, WEIGHTS) if schedule == "zbv" else (1, BACKWARD)
    done: dict[Piece, float] = {}
    clock, busy, at = [0.0] * devices, [0.0] * devices, [0] * devices
    held, most = [0] * devices, [0] * devices
    left = sum(map(len, left_to_do))
    while left:
        before = left
        for device, order in enumerate(left_to_do):
            while at[device] < len(order):
                piece = order[at[device]]
                ready = _ready(piece, done, home, len(forward) - 1, handover)
                if ready is None:
                    break
                kind, stage, _ = piece
                cost = forward[stage] if kind == FORWARD else backward[stage] / halved
                clock[device] = done[piece] = max(clock[device], ready) + cost
                busy[device] += cost
                held[device] += 1 if kind == FORWARD else -1 if kind == frees else 0
                most[device] = max(most[device], held[device])
                at[device] += 1
                left -= 1
        if left == before:
            raise SpecError(f"the schedule {schedule} cannot run {count} micro-batches on {devices} stages.")
    return Played(max(clock), tuple(busy), tuple(most))


def _ready(piece: Piece, done: dict[Piece, float], home: dict[int, int], last: int, handover: float) -> float | None:
    """When what a piece needs is there; None while nobody knows."""
    kind, stage, micro = piece
    if kind == WEIGHTS:
        before = (BACKWARD, stage, micro)
    elif kind == FORWARD:
        if stage == 0:
            return 0.0
        before = (FORWARD, stage - 1, micro)
    elif stage == last:
        before = (FORWARD, stage, micro)
    else:
        before = (BACKWARD, stage + 1, micro)
    if before not in done:
        return None
    return done[before] + (handover if home[before[1]] != home[stage] else 0.0)


def orders(schedule: str, devices: int, count: int) -> Iterator[Iterator[Piece]]:
    """What each device does, one after the other: as torch.distributed.pipelining orders it."""
    order = {"gpipe": _gpipe, "1f1b": _one_by_one, "interleaved": _interleaved, "zbv": _v_shaped}[schedule]
    for device in range(devices):
        yield (piece for piece in order(device, devices, count) if piece[2] < count)


def _gpipe(device: int, devices: int, count: int) -> Iterator[Piece]:
    yield from ((FORWARD, device, micro) for micro in range(count))
    yield from ((BACKWARD, device, micro) for micro in range(count))


def _one_by_one(device: int, devices: int, count: int) -> Iterator[Piece]:
    """As many forwards as it takes the first to come back, then one of each in turn."""
    ahead = min(devices - device, count)
    yield from ((FORWARD, device, micro) for micro in range(ahead))
    for micro in range(count):
        yield (BACKWARD, device, micro)
        if micro + ahead < count:
            yield (FORWARD, device, micro + ahead)


def _interleaved(device: int, devices: int, count: int) -> Iterator[Piece]:
    """Two stages a device, in rounds of as many micro-batches as there are devices."""
    size = max(1, count // max(1, count // devices))
    forwards = [(FORWARD, stage, micro) for stage, micro in _rounds(device, devices, count, size, up=True)]
    backwards = [(BACKWARD, stage, micro) for stage, micro in _rounds(device, devices, count, size, up=False)]
    ahead = min(len(forwards), (devices - device - 1) * 2 + size)
    yield from forwards[:ahead]
    for i, piece in enumerate(backwards):
        if ahead + i < len(forwards):
            yield forwards[ahead + i]
        yield piece


def _rounds(device: int, devices: int, count: int, size: int, up: bool) -> Iterator[tuple[int, int]]:
    stages = [device, device + devices]
    for first in range(0, count, size):
        for stage in stages if up else reversed(stages):
            yield from ((stage, micro) for micro in range(first, min(first + size, count)))


def _v_shaped(device: int, devices: int, count: int) -> Iterator[Piece]:
    """Down one side of the V and up the other, backward passes in two halves: so many forwards that the first one is
    back in time, one of everything in turn, and weights' gradients at the end in place of waiting."""
    down, up = device, 2 * devices - 1 - device
    count = max(count, 2 * devices)  # what the order is made for; the caller leaves out pieces beyond the real ones
    forwards, inputs, late = {down: 0, up: 0}, {down: 0, up: 0}, {down: 0, up: 0}

    def one(kind: str, stage: int, counted: dict[int, int]) -> Piece:
        counted[stage] += 1
        return (kind, stage, counted[stage] - 1)

    def back(stage: int) -> Iterator[Piece]:
        yield one(BACKWARD, stage, inputs)
        yield one(WEIGHTS, stage, late)

    for _ in range(2 * (devices - device) - 1):
        yield one(FORWARD, down, forwards)
    for _ in range(device):
        yield one(FORWARD, up, forwards)
        yield one(FORWARD, down, forwards)
    for _ in range(devices - device):
        yield one(FORWARD, up, forwards)
        yield from back(up)
    while forwards[up] < forwards[down] or forwards[down] < count:
        if forwards[down] < count:
            yield one(FORWARD, down, forwards)
        yield from back(down)
        yield one(FORWARD, up, forwards)
        yield from back(up)
    for _ in range(device):
        yield one(BACKWARD, down, inputs)
        yield one(BACKWARD, up, inputs)
    for _ in range(devices - device):
        yield from back(down)
    for stage in (up, down):
        while late[stage] < inputs[stage]:
            yield one(WEIGHTS, stage, late)

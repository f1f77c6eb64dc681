"""How a run scales: the same batch on more devices (strong), and a batch that grows with them (weak)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shoal.plan.asked import Asked
from shoal.plan.constants import spread
from shoal.plan.search import Found, search
from shoal.plan.verdict import Range

# A single number of devices is looked at from an eighth of it to eight times as many.
EACH_WAY = 8


@dataclass(frozen=True)
class Point:
    devices: int
    batch: int
    found: Found
    tokens_s: Range  # a device, without failures


def numbers(devices: Sequence[int]) -> list[int]:
    """Doublings, with the given ones among them: between the least and the most of several, around a single one."""
    low, high = min(devices), max(devices)
    if low == high:
        while low % 2 == 0 and low > high // EACH_WAY:
            low //= 2
        high *= EACH_WAY
    doubled, at = set(devices), low
    while at <= high:
        doubled.add(at)
        at *= 2
    return sorted(doubled)


def strong(asked: Asked, devices: Sequence[int]) -> list[Point]:
    return list(_points(asked, [(n, asked.run.train.batch) for n in devices]))


def weak(asked: Asked, devices: Sequence[int]) -> list[Point]:
    """As many windows a device as on the devices that are asked about; numbers that leave a broken window are out."""
    windows = [(n, *divmod(asked.run.train.batch * n, asked.devices)) for n in devices]
    return list(_points(asked, [(n, batch) for n, batch, rest in windows if batch and not rest]))


def _points(asked: Asked, wanted: Sequence[tuple[int, int]]) -> Iterator[Point]:
    """Where no layout is legal or fits there is no point."""
    low, high = spread()
    for devices, batch in wanted:
        run = asked.run.model_copy(update={"train": asked.run.train.model_copy(update={"batch": batch})})
        found = search(replace(asked, run=run, devices=devices), 1)
        if found and found[0].fits:
            speed = batch * run.data.seq_len / found[0].seconds / devices
            yield Point(devices, batch, found[0], Range(speed * low, speed, speed * high))

"""Which peers are near each other: regions, from measured links.

Peers are joined from the nearest pair on, as long as the worst link inside a group allows (complete linkage). The
merges have heights, and where these jump, from the top down, by a factor of three or more, the groups below the jump
are regions; each is looked at again by itself, so that one very far peer does not hide what is among the others. A
swarm whose links are all alike has no jump and is one region. There is no number of regions to choose, and no distance.

A link's badness is its round trip over its rate: both count, in the same proportion. Links measure a little different
each time, so a pair that is in one region counts as nearer than it is, one that is not as further: regions change when
the links have changed, not when they were measured again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from shoal.net.api import PeerId
from shoal.swarm.measured import LEAST_RTT_S, MOST_BYTES_PER_S, Measured

JUMP = 3.0
STICKY = 1.6  # how much better or worse a link has to become before it moves a peer

Regions = tuple[tuple[PeerId, ...], ...]
_Heights = NDArray[np.float64]


def regions(measured: Measured, before: Regions = ()) -> Regions:
    """Each with its peers in the order of their keys, and in the order of their first ones."""
    peers = measured.peers
    far = np.full((len(peers), len(peers)), -np.inf)
    was = {peer: i for i, region in enumerate(before) for peer in region}
    for i, a in enumerate(peers):
        for j, b in enumerate(peers[:i]):
            far[i, j] = far[j, i] = _badness(measured, a, b) + _stick(was.get(a), was.get(b))
    found = _split(far, list(range(len(peers))))
    return tuple(sorted(tuple(peers[i] for i in sorted(group)) for group in found))


def _badness(measured: Measured, a: PeerId, b: PeerId) -> float:
    rtt_s = max(measured.rtt_s(a, b), LEAST_RTT_S)
    rate = min(measured.bytes_per_s(a, b), measured.bytes_per_s(b, a), MOST_BYTES_PER_S)
    return math.log(rtt_s / max(rate, 1.0))


def _stick(a: int | None, b: int | None) -> float:
    if a is None or b is None:
        return 0.0
    return -math.log(STICKY) if a == b else math.log(STICKY)


def _split(far: _Heights, group: list[int]) -> list[list[int]]:
    heights, joined = _joins(far, group)
    for i in range(len(heights) - 1, 0, -1):
        if heights[i] - heights[i - 1] >= math.log(JUMP):
            return [part for cut in _below(group, joined[:i]) for part in _split(far, cut)]
    return [group]


def _joins(far: _Heights, group: list[int]) -> tuple[list[float], list[tuple[int, int]]]:
    """How bad the worst link is in each group that arises, and of which two it does; rising."""
    left = far[np.ix_(group, group)].copy()
    np.fill_diagonal(left, np.inf)
    heights, joined = [], []
    for _ in range(len(group) - 1):
        a, b = sorted(int(x) for x in np.unravel_index(int(np.argmin(left)), left.shape))
        heights.append(float(left[a, b]))
        joined.append((group[a], group[b]))
        worst = np.maximum(left[a], left[b])
        left[a], left[:, a] = worst, worst
        left[a, a] = np.inf
        left[b], left[:, b] = np.inf, np.inf
    return heights, joined


def _below(group: Iterable[int], joined: list[tuple[int, int]]) -> list[list[int]]:
    held = {i: [i] for i in group}
    for a, b in joined:
        held[a] += held.pop(b)
    return list(held.values())

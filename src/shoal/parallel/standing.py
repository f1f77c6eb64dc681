"""How far this process is in each of its groups: the number of collectives that it has begun there.

Two members of a group that wait for each other differ by who has not begun the collective that the other waits in. The
groups count by themselves, so this costs nothing until somebody looks (docs/decisions/023).
"""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed import distributed_c10d as c10d

from shoal.journal.collectives import begun
from shoal.parallel.count import axes
from shoal.parallel.place import Place


def standing(place: Place) -> Callable[[], dict[str, int]]:
    """Asked from another thread at any time; a group is named by its axis, its number and its members."""
    names = axes(place)

    return lambda: begun(c10d, place.rank, names)

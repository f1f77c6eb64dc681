"""Best-fit-decreasing packing: items go, longest first, each into the fullest bin that still has room for it. Pure.

Items of one length are alike, and so are bins with the same room. So what is done one by one in the textbook is done
here for all items of a length at once: the loop runs over lengths and rooms, not over items.
"""

from __future__ import annotations

import itertools
from collections import defaultdict

import numpy as np

from shoal.data.order import I64


def best_fit(lengths: I64, room: int) -> I64:
    """The bin of each item, [items]; bins hold `room` and are numbered by the first item in them. No item is cut."""
    if lengths.size and not 1 <= int(lengths.min()) <= int(lengths.max()) <= room:
        raise ValueError(f"an item does not fit a bin of {room}")
    bins = np.empty(len(lengths), np.int64)
    by_length = np.argsort(-lengths, kind="stable")
    cuts = [0, *(np.flatnonzero(np.diff(lengths[by_length])) + 1).tolist(), len(lengths)]
    left: defaultdict[int, list[I64]] = defaultdict(list)  # bins by the room that is left in them
    rooms = 0  # bit r: there are bins with room r left
    made = 0
    for lo, hi in itertools.pairwise(cuts):
        if lo == hi:
            continue
        length, items = int(lengths[by_length[lo]]), by_length[lo:hi]
        while len(items):
            fits = rooms >> length
            if fits:
                free = length + ((fits & -fits).bit_length() - 1)  # the least room that is enough
                some = left[free].pop()
            else:
                free = room
                some = np.arange(made, made + -(-len(items) // (room // length)))
                made += len(some)
            each = free // length  # a bin that got one of these is still the best for the next, while it has room
            taken = min(len(some), -(-len(items) // each))
            used, unused = some[:taken], some[taken:]
            bins[items[: taken * each]] = used.repeat(each)[: len(items)]
            last = min(len(items), taken * each) - (taken - 1) * each  # items in the last of these bins
            for now_left, them in (
                (free, unused),
                (free - each * length, used[:-1] if last < each else used),
                (free - last * length, used[-1:] if last < each else used[:0]),
            ):
                if now_left and len(them):
                    left[now_left].append(them)
                    rooms |= 1 << now_left
            if free in left and not left[free]:
                del left[free]
                rooms &= ~(1 << free)
            items = items[taken * each :]
    return _by_first_item(bins, made)


def _by_first_item(bins: I64, made: int) -> I64:
    first = np.full(made, len(bins))
    np.minimum.at(first, bins, np.arange(len(bins)))
    number = np.empty(made, np.int64)
    number[np.argsort(first)] = np.arange(made)
    return number[bins]

"""Each of many against all the others, in time that grows with their number and not with its square."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def median_of_others(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of each of at least two, the median of all but itself. Once sorted, leaving one out moves those behind it up."""
    left = len(values) - 1
    order = np.argsort(values, kind="stable")
    ascending, place = values[order], np.empty(len(values), dtype=np.int64)
    place[order] = np.arange(len(values))

    def without(k: int) -> NDArray[np.float64]:
        return np.where(place <= k, ascending[k + 1], ascending[k])

    middle = left // 2
    return without(middle) if left % 2 else (without(middle - 1) + without(middle)) / 2

"""Fits the constants of the cost model to published runs, and says how far off it is on runs that it has not seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from shoal.plan.case import Cases, Column
from shoal.plan.constants import Constants, bounds, names
from shoal.plan.step import tokens_per_second

# How strongly a constant is held to what was expected of it: a factor of e^0.4 = 1.5 costs as much as this error.
HELD, WIDTH = 0.004, 0.4
# An error beyond this counts no more: a row that is wrong, or a run with something in its way, must not lead.
MOST = 0.6
SWEEPS = 40
ONLY_EXPERTS = ("uneven", "permute", "beside_ep", "exchange")


@dataclass(frozen=True)
class Seen:
    """Runs with the speed that was measured."""

    cases: Cases
    tokens_s: Column
    weight: Column

    def take(self, which: npt.NDArray[np.bool_]) -> Seen:
        return Seen(self.cases.take(which), self.tokens_s[which], self.weight[which])


def weights(groups: Sequence[object]) -> Column:
    """A source with many rows says more than one with few, but not in proportion."""
    counts = {group: groups.count(group) for group in set(groups)}
    return np.array([counts[group] ** -0.5 for group in groups])


def fit(seen: Seen, seed: int = 0) -> Constants:
    """Coordinate by coordinate with steps that grow where they help and shrink where they do not. The constants are few
    and each has a meaning, so the landscape is tame; a fixed seed makes the answer one."""
    rng = np.random.default_rng(seed)
    free = names() if (seen.cases.experts > 0).any() else [n for n in names() if n not in ONLY_EXPERTS]
    best = Constants()
    cost = _cost(seen, best)
    reach = dict.fromkeys(free, 0.3)
    for _ in range(SWEEPS):
        for name in rng.permutation(free):
            low, high = bounds(name)
            for way in (1, -1):
                factor = float(np.exp(way * reach[name] * rng.uniform(0.3, 1.0)))
                tried = replace(best, **{name: float(np.clip(getattr(best, name) * factor, low, high))})
                if (found := _cost(seen, tried)) < cost:
                    best, cost = tried, found
                    reach[name] = min(reach[name] * 1.3, 0.6)
                    break
            else:
                reach[name] *= 0.75
    return best


def errors(seen: Seen, c: Constants) -> Column:
    """Predicted over measured, less one."""
    return tokens_per_second(seen.cases, c) / seen.tokens_s - 1


def unseen(seen: Seen, groups: Sequence[str]) -> Column:
    """Errors on each group of runs, by constants that were fitted without it."""
    found = np.zeros(len(groups))
    labels = np.array(groups)
    for group in sorted(set(groups)):
        out = labels == group
        found[out] = errors(seen.take(out), fit(seen.take(~out)))
    return found


def _cost(seen: Seen, c: Constants) -> float:
    off = np.minimum(np.abs(np.log(tokens_per_second(seen.cases, c) / seen.tokens_s)), MOST)
    strain = sum(
        (np.log(getattr(c, f.name) / f.default) / WIDTH) ** 2 for f in fields(Constants) if isinstance(f.default, float)
    )
    return float(np.sum(off * seen.weight) / np.sum(seen.weight) + HELD * strain)

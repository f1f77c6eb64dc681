"""What all ranks agree on about a step, summed over them while the step before it is computed.

A sum over the world's hosts takes 2(N - 1) hops of a ring: 50 to 100 ms at a thousand ranks, in which no GPU would have
anything to do. All that it carries can be said a step ahead: how much the next batch has (its order is a function),
whether anybody was told to stop, how the saves stand. So it begins before a step computes and is asked for after it.
Whoever is late with it by less than a step delays nobody.

What was summed of a batch is known by the batch's number: where a batch is left out, or the run goes back, the next one
is another, and it is summed on the spot, as that of the first step is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shoal.parallel.place import Place, Summing
from shoal.train.amount import Amount


@dataclass
class Exchange:
    """The sums of one rank. All ranks call the same, in the same order."""

    _under_way: tuple[int | None, Summing] | None = None  # (batch that comes next, its sum)
    _known: tuple[int | None, Amount] | None = None  # (batch that comes next, what all ranks have of it)
    _stop: bool = False

    def of(self, place: Place, batch: int, mine: Callable[[], Amount], stop: bool) -> tuple[Amount, bool]:
        """What all ranks have of a batch, and whether the run is to stop before it. `mine` and `stop` are this rank's,
        and travel only where nothing is known of the batch. One process alone hears itself at once."""
        assert self._under_way is None, "what was begun has not been heard"
        if self._known is None or self._known[0] != batch:
            self._note(batch, *place.sum_of_batch(*mine(), float(stop)))
        assert self._known is not None
        return self._known[1], self._stop or (stop and place.world == 1)

    def begin(self, place: Place, batch: int | None, mine: Amount, stop: bool, votes: tuple[float, ...]) -> None:
        """Before a step computes: about the next one, which reads `batch`, and how the saves stand now. None: there is
        no next one, unless this one comes to nothing; then its next batch is not known yet."""
        self._under_way = batch, place.begin_sum_of_batch(*mine, float(stop), *votes)

    def join(self) -> list[float]:
        """What all ranks have said of the saves in the last `begin`; waits until all of them have."""
        assert self._under_way is not None, "nothing was begun"
        (batch, summing), self._under_way = self._under_way, None
        said = summing.wait()
        self._note(batch, *said[: len(Amount._fields) + 1])
        return said[len(Amount._fields) + 1 :]

    def _note(self, batch: int | None, *said: float) -> None:
        *amount, stop = said
        self._known, self._stop = (batch, Amount(*amount)), bool(stop)

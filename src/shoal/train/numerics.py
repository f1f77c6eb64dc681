"""What becomes of a step whose numbers are wrong. All ranks decide alike, from numbers that all of them have.

- A loss or a gradient that is not finite: no update; the batch is left out, and the step is taken with the next one.
- A spike of the loss (`shoal.train.spikes`): back to a state from before it, and the batches from there through the
  spike are left out. PaLM did so by hand, about 20 times (arXiv:2204.02311, 5.1): the same batches did no harm from
  another state, so that it is neither the data nor the state alone, and to go around them is enough.

Both are journaled and bounded; then the run stops, with the words of what is wrong.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from shoal.data.skips import Skips, Spans
from shoal.errors import NumericsError
from shoal.journal.columns import Array
from shoal.journal.journal import Record
from shoal.journal.reading import Told, told, told_of
from shoal.parallel import agree
from shoal.spec.run import Guard
from shoal.train.spikes import ROW, WINDOW, Taken, spike

Tell = Callable[..., None]
NEAR = 1000  # steps: what happened further back does not count against the run
MARGIN = 8  # steps before a spike: the update that began it is older than the loss that shows it
ADVICE = "lower train.optimizer.lr, lengthen train.schedule.warmup_steps or set train.clip, then resume the run."


class NotFinite(Exception):
    """The loss or the gradient of a batch is not finite, on all ranks; no update was made."""

    def __init__(self, batch: int, loss: float, norm: float, begin: float) -> None:
        super().__init__(f"batch {batch}: loss {loss}, gradient norm {norm}")
        self.batch, self.loss, self.norm, self.begin = batch, loss, norm, begin


class Rewind(Exception):
    """All ranks: go on from a state of `good` steps or fewer."""

    def __init__(self, good: int, step: int, why: str, begin: float | None = None) -> None:
        super().__init__(f"from step {step} back to {good}: {why}")
        self.good, self.step, self.why = good, step, why
        self.begin = round(time.time(), 6) if begin is None else begin


@dataclass
class Past:
    """What a start must know of those before it, so that it decides as they would have."""

    spans: Spans = field(default_factory=list)  # batches that were left out
    taken: list[tuple[int, float, float]] = field(default_factory=list)  # step, loss, gradient norm
    skipped: list[int] = field(default_factory=list)  # steps at which a batch was left out
    rewound: list[int] = field(default_factory=list)  # … from which the run went back
    in_a_row: int = 0  # batches that were left out since the last step

    @classmethod
    def of(cls, records: Told | Iterable[Record], step: int) -> Past:
        """From the journal; the run goes on from `step`. The last record of a step is the one that counts."""
        past, known = cls(), told_of(records)
        for _, record in known.others(("skip", "rewind")):
            match record["kind"]:
                case "skip":
                    past.spans.append([record["batch"]] * 2)
                    past.skipped.append(record["step"])
                case "rewind":
                    past.spans.append(record["batches"])
                    past.rewound.append(record["step"])
        rows = _newest(known.column("step"), step)
        if rows.size:
            first, end = int(rows.min()), int(rows.max()) + 1
            columns = (known.column(name, first, end)[rows - first].tolist() for name in ("step", "loss", "grad_norm"))
            past.taken = list(zip(*columns, strict=True))
        return past

    @classmethod
    def of_journal(cls, journal: Path, step: int) -> Past:
        """As rank 0 reads it, on every rank. Collective."""
        here = agree.here()[0] == 0 and journal.exists()
        return (cls.of(told(journal), step) if here else cls())._everywhere()

    def _everywhere(self) -> Past:
        return Past(**json.loads(agree.text_from_rank_0(json.dumps(asdict(self)))))


def _newest(steps: Array, step: int) -> Array:
    """Where the last steps up to that one are told, each as it was done last."""
    rows = np.flatnonzero((steps <= step) & (steps > step - 4 * (WINDOW + ROW)))[::-1]
    numbers, first = np.unique(steps[rows], return_index=True)
    if len(numbers) < WINDOW + ROW:  # few steps, or few of them told
        rows = np.flatnonzero(steps <= step)[::-1]
        numbers, first = np.unique(steps[rows], return_index=True)
    return np.asarray(rows[first[-WINDOW - ROW :]])


class Numerics:
    """The guard of one rank."""

    def __init__(
        self,
        policy: Guard | None = None,
        skips: Skips | None = None,
        tell: Tell = lambda kind, **fields: None,
        past: Past | None = None,
        good_before: Callable[[int], int] = lambda step: -1,
        replay: Callable[[int], None] = lambda step: None,
    ) -> None:
        """`skips` already knows what the past has left out. `good_before`: the newest saved step up to one; -1: none.
        Collective. `replay`: `shoal.train.replay`."""
        self._policy, self._tell, self._good_before = policy or Guard(), tell, good_before
        self.replay = replay
        self.skips = Skips() if skips is None else skips
        self.stand(past or Past())

    def stand(self, past: Past) -> None:
        """Goes on from there. Which batches it leaves out is for the caller to say (`skips`)."""
        self._taken = deque((Taken(*one) for one in past.taken), maxlen=WINDOW + ROW)
        self._skipped, self._rewound = list(past.skipped), list(past.rewound)
        self._in_a_row = past.in_a_row

    def standing(self) -> Past:
        """What another one needs to decide as this one from here on."""
        taken = [(t.step, t.loss, t.norm) for t in self._taken]
        return Past(list(self.skips.spans), taken, list(self._skipped), list(self._rewound), self._in_a_row)

    # A number that is none

    @staticmethod
    def check(batch: int, numbers: Sequence[float], begin: float) -> tuple[float, float]:
        """Loss and norm, if they are numbers."""
        loss, norm = numbers
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise NotFinite(batch, loss, norm, begin)
        return loss, norm

    def skip(self, step: int, wrong: NotFinite) -> None:
        """Leaves out the batch of a step that was not taken; `NumericsError` where that may not be."""
        policy, loss, norm = self._policy, wrong.loss, wrong.norm
        near = sum(step + 1 - NEAR < at <= step + 1 for at in self._skipped)
        self._in_a_row += 1
        if policy.numerics == "stop" or self._in_a_row > policy.skips or near >= 3 * policy.skips:
            after = ""
            if policy.numerics == "skip" and policy.skips:
                after = f" (batches skipped before it: {self._in_a_row - 1} in a row, {near} in {NEAR} steps)"
            raise NumericsError(
                f"step {step + 1} has loss {loss:.4g} and gradient norm {norm:.4g}, so no update was made{after}: "
                f"{ADVICE}"
            )
        self._skipped.append(step + 1)
        self.skips.add(wrong.batch)
        what = "loss" if not math.isfinite(loss) else "gradient norm"
        self._tell(
            "skip",
            step=step + 1,
            begin=wrong.begin,
            batch=wrong.batch,
            loss=loss,
            grad_norm=norm,
            why=f"the {what} is not finite, so no update was made",
        )

    # A spike

    def taken(self, step: int, loss: float, norm: float) -> None:
        """A step was taken, counted from 1. Collective."""
        self._in_a_row = 0
        self.replay(step)
        if self._policy.spikes == "off":
            return
        self._taken.append(Taken(step, loss, norm))
        if self._policy.spikes == "warn" and (found := spike(self._taken)):
            self._tell("warning", text=f"loss spike: {found.why}; `guard.spikes: rewind` would go around it")
            self._taken.clear()

    def alarm(self) -> bool:
        """Whether the run should go back before it takes another step."""
        return self._policy.spikes == "rewind" and spike(self._taken) is not None

    def go_back(self, step: int) -> None:
        """After an alarm, which all ranks hear alike: raises `Rewind` on all of them, or goes on where there is nothing
        to go back to. `step` were taken. Collective."""
        found = spike(self._taken)
        assert found is not None, "nobody goes back without an alarm"
        near = self._near(step)
        if near >= self._policy.rewinds:
            raise NumericsError(
                f"the loss has spiked at step {found.first} ({found.why}), after {near} rewinds in {NEAR} steps: "
                f"{ADVICE}"
            )
        before = max(0, found.first - 1 - MARGIN)
        good = self._good_before(before)
        if good >= 0:
            raise Rewind(good, step, found.why)
        self._tell("warning", text=f"loss spike: {found.why}; no checkpoint of step {before} or older to go back to")
        self._taken.clear()

    def rewound(self, cause: Rewind, to: int, known: Spans) -> list[int]:
        """The state stands at step `to` again, and `skips` as it did then; `known` is what was left out by now. Says
        which batches the run goes around: those from there through the spike, and after further rewinds nearby as many
        more again for each. A stretch of bad data is passed in a few of them."""
        first, last = self.skips.batch_of(to), Skips(known).batch_of(cause.step - 1)
        last += self._near(cause.step) * (last - first + 1)
        self._tell("rewind", step=cause.step, to=to, begin=cause.begin, batches=[first, last], why=cause.why)
        return [first, last]

    def _near(self, step: int) -> int:
        return sum(abs(step - at) < NEAR for at in self._rewound)

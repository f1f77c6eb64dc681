"""How a peer of a pipeline stands, as it tells the lead: typed, and within ranges."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from shoal.net.api import Message, PeerId
from shoal.spec.cut import MOST_PEERS
from shoal.stages.routes import MOST_COUNT, MOST_ROUTES, MOST_SUM, Plan
from shoal.values import flag, items, name, real, table, text, whole

MOST_SAVED = 1000
MOST_SECONDS = 1e6
Order = tuple[int, int]
Measured = tuple[int, float, int]  # a micro-batch of held-out data, its loss summed over its targets, and how many


@dataclass(frozen=True)
class Ready:
    """It has its stage's sum of this step."""

    order: Order  # of the plan that it was made by
    square: float
    loss: float
    digest: str
    measured: tuple[Measured, ...] = ()  # by a peer of the last stage, where held-out data is


@dataclass(frozen=True)
class Report:
    born: str
    run: str
    at: int
    era: int
    order: Order | None  # of the newest plan that it has; None: none yet
    saved: tuple[int, ...]
    lost: bool
    ready: Ready | None
    seconds: float  # of a micro-batch
    refuses: tuple[PeerId, ...] = ()  # whose messages it cannot read

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def of_json(value: object) -> Report:
        """BadValue for what is none. A plan may stand beside it."""
        s = table(value, 32)
        ready = s.get("ready")
        return Report(
            born=text(s.get("born"), 64),
            run=text(s.get("run"), 256),
            at=whole(s.get("at"), MOST_COUNT),
            era=whole(s.get("era"), MOST_COUNT),
            order=None if s.get("order") is None else _order(s["order"]),
            saved=tuple(whole(step, MOST_COUNT) for step in items(s.get("saved"), MOST_SAVED)),
            lost=flag(s.get("lost")),
            ready=None if ready is None else _ready(table(ready, 8)),
            seconds=real(s.get("seconds"), MOST_SECONDS, 0.0),
            refuses=tuple(name(peer) for peer in items(s.get("refuses", []), MOST_PEERS)),
        )


def read_where(answer: Message) -> tuple[Report, Plan | None]:
    """Of a peer that was asked how it stands: its report, and its newest plan if that was asked for."""
    plan = answer.fields.get("plan")
    return Report.of_json(answer.fields), None if plan is None else Plan.of_json(plan)


def _ready(s: dict[str, Any]) -> Ready:
    square, loss = real(s.get("square"), MOST_SUM, 0.0), real(s.get("loss"), MOST_SUM, -MOST_SUM)
    measured = tuple(_measured(one) for one in items(s.get("measured", []), MOST_ROUTES))
    return Ready(_order(s.get("order")), square, loss, text(s.get("digest"), 128), measured)


def _measured(said: object) -> Measured:
    m, loss, targets = [*items(said, 3), None, None, None][:3]
    return whole(m, MOST_COUNT), real(loss, MOST_SUM, -MOST_SUM), whole(targets, MOST_COUNT)


def _order(said: object) -> Order:
    term, number = [*items(said, 2), None, None][:2]
    return whole(term, MOST_COUNT), whole(number, MOST_COUNT)

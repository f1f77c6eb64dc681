"""Which peer computes which micro-batch in each stage: pure functions of who is there and how fast each one was.

A route is decided as a whole by the lead and only ever changed for peers that are gone. So every peer knows where a
micro-batch came from and where it goes, and none is counted twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from shoal.net.api import PeerId
from shoal.spec.cut import MOST_MICRO_BATCHES, MOST_PEERS
from shoal.values import items, name, real, table, whole

MOST_COUNT = 1 << 40  # of terms, plans, eras and steps
MOST_ROUTES = MOST_MICRO_BATCHES
MOST_SUM = 1e300  # of squares or losses: a run that diverges is no lie
MOST_SETS = 1000  # of held-out data
TRAIN = MOST_COUNT  # the phase of a step in which it is taken; held-out data is measured before it
Routes = tuple[tuple[PeerId, ...], ...]  # [micro-batch][stage]
Layout = tuple[tuple[PeerId, ...], ...]  # [stage]: the peers that hold it, in the order of their gradients' sum
When = tuple[int, int, int]  # era, committed steps, phase: what everything that travels belongs to


@dataclass(frozen=True)
class Commit:
    """What a step that counts did: enough for a peer that holds its stage's summed gradient to take it."""

    step: int  # committed steps before it
    factor: float  # what gradients are multiplied by: one over the targets, and the clipping; so from 0 to 1
    loss: float
    norm: float

    @staticmethod
    def of_json(value: object) -> Commit:
        s = table(value, 8)
        step, factor = whole(s.get("step"), MOST_COUNT), real(s.get("factor"), 1.0, 0.0)
        return Commit(step, factor, real(s.get("loss"), MOST_SUM, -MOST_SUM), real(s.get("norm"), MOST_SUM, 0.0))


@dataclass(frozen=True)
class Sums:
    """Of the losses on each set of held-out data and of its targets, after some steps."""

    step: int
    losses: tuple[float, ...]
    targets: tuple[int, ...]

    @staticmethod
    def of_json(value: object) -> Sums:
        s = table(value, 8)
        losses = tuple(real(loss, MOST_SUM, -MOST_SUM) for loss in items(s.get("losses"), MOST_SETS))
        targets = tuple(whole(n, MOST_COUNT) for n in items(s.get("targets"), MOST_SETS))
        return Sums(whole(s.get("step"), MOST_COUNT), losses, targets)


@dataclass(frozen=True)
class Plan:
    """One step, as the lead has laid it out. A newer one (by term, then number) replaces it.

    Where held-out data is measured after a step, that comes first: as many of its micro-batches as a step has, then the
    next ones (`phase`: the first of them), under the same routes and with the sums so far.
    """

    term: int
    number: int
    era: int  # counts returns to a saved state: messages of an earlier era are of no use
    step: int  # committed steps before this one
    members: tuple[PeerId, ...]
    routes: Routes
    learners: dict[PeerId, PeerId] = field(default_factory=dict)  # newcomer: the sibling it has its state from
    commit: Commit | None = None  # of the step before: whoever is ready for it takes it now
    lead: PeerId = ""
    phase: int = TRAIN
    sums: Sums | None = None  # of the phases before this one; when the step is taken, of the last measurement

    @property
    def order(self) -> tuple[int, int]:
        return self.term, self.number

    @property
    def when(self) -> When:
        return self.era, self.step, self.phase

    @property
    def measures(self) -> bool:
        return self.phase != TRAIN

    def to_json(self) -> dict[str, Any]:
        """Routes as numbers: with 500 micro-batches over 16 stages, keys alone would be half a megabyte."""
        names = sorted({p for route in self.routes for p in route})
        at = {p: i for i, p in enumerate(names)}
        return {**asdict(self), "names": names, "routes": [[at[p] for p in route] for route in self.routes]}

    @staticmethod
    def of_json(value: object) -> Plan:
        """From another peer. BadValue for what is none."""
        s = table(value, 16)
        names = [name(p) for p in items(s.get("names"), MOST_PEERS)]
        routes = [[whole(i, len(names) - 1) for i in items(r, MOST_PEERS)] for r in items(s.get("routes"), MOST_ROUTES)]
        return Plan(
            whole(s.get("term"), MOST_COUNT),
            whole(s.get("number"), MOST_COUNT),
            whole(s.get("era"), MOST_COUNT),
            whole(s.get("step"), MOST_COUNT),
            tuple(name(p) for p in items(s.get("members"), MOST_PEERS)),
            tuple(tuple(names[i] for i in route) for route in routes),
            {name(k): name(v) for k, v in table(s.get("learners"), MOST_PEERS).items()},
            None if s.get("commit") is None else Commit.of_json(s["commit"]),
            name(s.get("lead")),
            whole(s.get("phase"), TRAIN),
            None if s.get("sums") is None else Sums.of_json(s["sums"]),
        )

    def fits(self, layout: Layout, micro_batches: int, steps: int, sets: int = 0) -> bool:
        """Whether it speaks of these peers, micro-batches, steps and sets of held-out data, each where it belongs."""
        stage = {p: i for i, peers in enumerate(layout) for p in peers}
        known = {*self.members, *self.learners, *self.learners.values(), self.lead} <= stage.keys()
        placed = all(len(r) == len(layout) and all(stage.get(p) == i for i, p in enumerate(r)) for r in self.routes)
        siblings = all(stage.get(p) == stage.get(donor) for p, donor in self.learners.items())
        in_turn = self.step <= steps and (self.commit is None or self.commit.step == self.step - 1)
        summed = self.sums is None or len(self.sums.losses) == len(self.sums.targets) == sets
        measured = not self.measures or (sets > 0 and len(self.routes) == micro_batches)
        many = len(self.routes) in (0, micro_batches)
        return known and placed and siblings and in_turn and many and summed and measured

    def mine(self, peer: PeerId, stage: int) -> list[int]:
        """The micro-batches of a peer, in order."""
        return [m for m, route in enumerate(self.routes) if route[stage] == peer]


def in_turn(layout: Layout) -> list[list[PeerId]]:
    """The first peers of all stages, then the second ones, and so on: the order in which peers lead."""
    most = max(len(peers) for peers in layout)
    return [[peers[i] for peers in layout if i < len(peers)] for i in range(most)]


def dealt(micro_batches: int, stages: Sequence[Sequence[PeerId]], seconds: Mapping[PeerId, float]) -> Routes:
    """Micro-batches to the peers of each stage, in turn, as often as they are fast. `seconds`: of one micro-batch;
    a peer not measured yet counts as its stage's fastest."""
    columns = [_turns(micro_batches, peers, seconds) for peers in stages]
    return tuple(zip(*columns, strict=True))


def _turns(count: int, peers: Sequence[PeerId], seconds: Mapping[PeerId, float]) -> list[PeerId]:
    """Each goes to whoever will have finished it first."""
    known = [seconds[p] for p in peers if seconds.get(p, 0) > 0]
    least = min(known, default=1.0)
    each = {p: seconds.get(p) or least for p in peers}
    busy = dict.fromkeys(peers, 0.0)
    turns = []
    for _ in range(count):
        peer = min(peers, key=lambda p: busy[p] + each[p])  # the first of several in the layout's order
        busy[peer] += each[peer]
        turns.append(peer)
    return turns


def rerouted(
    routes: Routes, stages: Sequence[Sequence[PeerId]], gone: Iterable[PeerId], seconds: Mapping[PeerId, float]
) -> Routes:
    """The micro-batches of peers that are gone go to others of their stage, the rest stay where they are."""
    away = set(gone)
    columns = []
    for stage, peers in enumerate(stages):
        column = [route[stage] for route in routes]
        left = [p for p in peers if p not in away]
        orphans = [m for m, p in enumerate(column) if p in away]
        for m, peer in zip(orphans, _turns(len(orphans), left, seconds) if left else (), strict=False):
            column[m] = peer
        columns.append(column)
    return tuple(zip(*columns, strict=True))


def misread(stages: Sequence[Sequence[PeerId]], blames: Mapping[PeerId, set[PeerId]], keep: PeerId) -> set[PeerId]:
    """Who is left out where peers cannot read what others of them send; `blames`: by each, whose messages. Of two the
    one goes that has a sibling in its place: one whom nobody blames, else one who does not blame. Who is right cannot
    be told. Nobody goes where the step could not be taken without it."""
    blamed = set[PeerId]().union(*blames.values())
    out = {p for peers in stages for p in peers if p in blamed and p != keep and any(q not in blamed for q in peers)}
    for peers in stages:
        for p in peers:
            still = blames.get(p, set()) - out
            others = [q for q in peers if q != p and q not in out]
            if still and p not in out and p != keep and any(not blames.get(q, set()) & still for q in others):
                out.add(p)
    return out


def enough(members: Sequence[PeerId], here: Iterable[PeerId]) -> bool:
    """Whether those who are here may go on for all of the last agreed members: more than half of them, or half with
    the first. So two halves of a split network never both go on."""
    there = [p for p in members if p in set(here)]
    return 2 * len(there) > len(members) or (2 * len(there) == len(members) and members[:1] == tuple(there[:1]))

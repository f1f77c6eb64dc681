"""Whether the weights here are those that the others have, and what is done when they are not.

Most have others: they are fetched again. A split, where nobody's are most's, is no matter of votes: weights follow from
the history, and a bit that flips in a memory does so once. So everybody computes the rounds since the last agreed
state a second time, and whoever was wrong sees its own digest change. Only where peers insist on different weights
does a fixed rule decide (`digests.Split.counts`), and the others take that state.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from shoal.errors import SetupError
from shoal.net.api import PeerId
from shoal.swarm.digests import Split
from shoal.swarm.round_record import Certified
from shoal.swarm.snapshots import Snapshot

if TYPE_CHECKING:
    from shoal.swarm.node import Node

DOUBT_S, MOST_DOUBTS = 600.0, 3


class Doubt:
    def __init__(self, node: Node) -> None:
        self._node = node
        self.split: Split | None = None  # as it was seen last, until most have the same weights as this peer
        self.twice = False  # what this peer tells of its weights was computed again because of it
        self._since = 0  # the round after which it was noticed
        self._before: dict[str, str] = {}  # what this peer's weights were then, by record
        self._gave_up = self._decided = False  # since then
        self._trust: frozenset[PeerId] = frozenset()
        self._wrong: list[float] = []  # when its weights were wrong lately (monotonic)
        self._checks: list[float] = []  # when it has computed again lately

    def tick(self) -> None:
        node, work = self._node, self._node.work
        if (differs := node.digests.differs(work.digests)) is not None:
            self._differs(differs)
        if not work.listens or work.applied not in work.digests:
            return
        if (split := node.digests.split(node.me)) is not None:
            if self.twice:
                self._decide(split)
            else:
                self._notice(split)
        elif self.split is not None and node.digests.most(work.applied) == work.digests[work.applied]:
            round = node.chain.get(work.applied).round
            if round >= self._since:  # else it is still on its way there
                self._settled(round)

    def committed(self, new: Certified) -> None:
        """Perhaps most have signed that the weights before it are others than ours."""
        record, node = new.record, self._node
        mine, members = node.work.digests.get(record.parent), node.chain.get(record.parent).members
        signed = [peer for peer in members if peer in new.signatures]
        if None not in (mine, record.state) and mine != record.state and 2 * len(signed) > len(members):
            self._differs(record.round - 1)

    def _differs(self, round: int) -> None:
        """Our weights are not those of most: they are fetched again."""
        text = f"this peer's weights after round {round} are not those of most: it fetches them again"
        self._node.event("differs", round=round, text=text)
        self._give_up(keep=lambda snapshot: False)

    def _give_up(self, keep: Callable[[Snapshot], bool]) -> None:
        self._gave_up, self.twice, self._trust = True, False, frozenset()
        self._was_wrong()
        self._node.snapshots.forget(keep)
        self._node.work.give_up()
        self._node.work.digests.clear()

    def _was_wrong(self) -> None:
        """A machine that goes on computing others than everybody else has no place in a swarm."""
        self._wrong = [*_lately(self._wrong), time.monotonic()]
        if len(self._wrong) > MOST_DOUBTS:
            why = "computes other weights than the others from the same parts: its memory, processor or numba is wrong"
            self._node.fail(SetupError(f"this machine {why}."))

    # Where to begin.

    @property
    def ever(self) -> bool:
        """This peer's state was wrong: where there is a history, it does not begin with nothing."""
        return bool(self._wrong)

    @property
    def trust(self) -> frozenset[PeerId]:
        """Whose state is to be taken and no other, while one of them is a member."""
        return self._trust if self._trust & {*self._node.chain.head.members} else frozenset()

    def allows(self, peer: PeerId, snapshot: Snapshot) -> bool:
        """Whether another peer's state may be begun with. Not of somebody who has not noticed yet that its weights are
        wrong."""
        if self.trust and (peer not in self.trust or snapshot.round < self._since):
            return False
        return self._node.digests.agreed(snapshot.hash) in (None, snapshot.digest)

    def begun(self) -> None:
        self._trust = frozenset()

    # A split.

    def _notice(self, split: Split) -> None:
        """Everybody who is in it computes again, from the newest state that was agreed on."""
        node, work = self._node, self._node.work
        self.split, self.twice, self._since, self._before = split, True, split.round, dict(work.digests)
        self._gave_up = self._decided = False
        self._checks = _lately(self._checks)
        base = node.snapshots.before(node.chain.head.hash, good=self._is_agreed)
        if len(self._checks) >= MOST_DOUBTS:  # one that lies now and then would keep us busy with it
            does, base = f"this peer has computed them again {MOST_DOUBTS} times lately and does not now", None
        elif base is None:
            does = "this peer has no agreed state left to compute them again from"
        else:
            does = f"this peer computes them again from round {base.round}"
        text = f"weights differ after round {split.round}: {self._sides(split)}; {does}"
        node.event("split", round=split.round, sides=_keys(split), text=text)
        if base is None:
            node.training.tell_digest()
            return
        self._checks.append(time.monotonic())
        node.snapshots.forget(keep=self._is_agreed)
        work.digests.clear()
        work.begin_from(base)

    def _decide(self, split: Split) -> None:
        """All have computed again, and insist: who is not on the side that counts takes its state."""
        self.split, node = split, self._node
        if not split.twice or split.counts is None:
            return
        side = split.sides[split.counts]
        if not self._decided:
            self._decided = True
            counts = f"those of {', '.join(map(node.name_of, side))} count (more peers, else the first member's side)"
            text = f"all have computed the weights after round {split.round} again and still differ: "
            text += f"{self._sides(split)}; {counts}, the others take them"
            node.event("split-decided", round=split.round, sides=_keys(split), text=text)
            if node.me in side:
                node.work.save()  # for them
        if node.me not in side:
            self._give_up(keep=self._is_agreed)
            self._trust = frozenset(side)

    def _settled(self, round: int) -> None:
        """Most have the same weights, and this peer has them."""
        now = self._node.work.digests
        changed = self._gave_up or any(now.get(name, told) != told for name, told in self._before.items())
        text = (
            f"after round {round} most have the same weights again; this peer's were {'wrong' if changed else 'right'}"
        )
        self._node.event("split-settled", round=round, changed=changed, text=text)
        self.split, self.twice, self._before = None, False, {}
        if changed and not self._gave_up:  # that one was counted
            self._was_wrong()

    def _is_agreed(self, snapshot: Snapshot) -> bool:
        """The beginning is not computed."""
        return snapshot.round == 0 or self._node.digests.agreed(snapshot.hash) == snapshot.digest

    def _sides(self, split: Split) -> str:
        sides = (f"{', '.join(map(self._node.name_of, s))} ({digest[:8]})" for digest, s in split.sides.items())
        return " against ".join(sides)


def _keys(split: Split) -> list[list[str]]:
    return [[peer[:8] for peer in side] for side in split.sides.values()]


def _lately(times: list[float]) -> list[float]:
    return [at for at in times if time.monotonic() - at < DOUBT_S]

"""Bad weather for a swarm in simulated time, and what is asked of it: where most members hear each other, records go on
within a bound; no head has two rounds; when all is well again, all agree.

    python -m tests.swarm.storms FIRST LAST      tries these seeds, and says which of them fail
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from dataclasses import replace

from shoal.swarm.chain import majority
from shoal.swarm.round_record import Record
from tests.swarm.simulator import RULES, STRAY_S, Sim, name

CALM_S = 60.0  # where whoever is not in reach is silent: some silences, a merge that fails, and a round
STUCK_S = 100.0  # a leader that decides nothing is borne for longer: in calm nobody has to wait for that
HEAL_S = 180.0


class Storm:
    """2 to 12 peers, and things that happen to them. All that is by chance comes from the seed."""

    def __init__(self, seed: int) -> None:
        self.peers = 2 + seed % 11
        peers = min(self.peers, 1 + seed // 11 % 4)
        rules = replace(RULES, stuck_s=STUCK_S, peers=peers, branches=seed // 44 % 3 != 0)
        self.sim = Sim(self.peers, seed, rules)
        self.rng = self.sim.rng
        self.owed = 0  # how often records had to go on

    def run(self) -> None:
        sim, rng = self.sim, self.rng
        sim.loss, sim.stray = rng.choice([0.0, 0.0, 0.05, 0.2]), rng.choice([0.0, 0.0, 0.02])
        sim.run(rng.choice([0.0, 15.0, 15.0]))
        for _ in range(3):
            for _ in range(rng.randrange(2, 7)):
                self._happen()
                sim.run(rng.choice([rng.uniform(0.0, 1.0), rng.uniform(0.5, 6), rng.uniform(3, 20)]))
            self._settle()
        self._all_is_well()

    # What happens.

    def _some(self, most: int | None = None) -> list[str]:
        all_of_them = sorted(self.sim.disks)
        return self.rng.sample(all_of_them, self.rng.randint(1, min(len(all_of_them), most or len(all_of_them))))

    def _happen(self) -> None:
        self.rng.choice(
            [self._die, self._die_while_leading, self._come_back, self._part, self._one_way, self._lossy, self._sleep,
             self._slow, self._leave, self._join, self._heal, self._hub, self._put_out]
        )()  # fmt: skip

    def _die(self) -> None:
        for me in self._some((self.peers + 1) // 2):
            self.sim.kill(me)

    def _die_while_leading(self) -> None:
        """Or in the middle of taking over, and back at once: what it knows is what it wrote down."""
        back = self.rng.random() < 0.5
        for peer in list(self.sim.peers.values()):
            if peer.decider.leader() == peer.me:
                self.sim.kill(peer.me)
                if back:
                    self.sim.run(self.rng.uniform(0, 2))
                    self.sim.restart(peer.me)

    def _come_back(self) -> None:
        for me in self._some():
            self.sim.leaving.discard(me)
            self.sim.restart(me)

    def _part(self) -> None:
        sides = self.rng.randint(2, 3)
        for me in sorted(self.sim.disks):
            self.sim.side[me] = self.rng.randrange(sides)

    def _one_way(self) -> None:
        for me in self._some(3):
            for other in self._some():
                self.sim.losses[self.rng.choice([(me, other), (other, me)])] = 1.0

    def _lossy(self) -> None:
        for me in self._some(4):
            for other in self._some():
                self.sim.losses[me, other] = self.rng.choice([0.3, 0.7])

    def _sleep(self) -> None:
        for me in self._some(3):
            self.sim.asleep[me] = self.sim.now + self.rng.choice([2.0, 4.0, 30.0])

    def _slow(self) -> None:
        for me in self._some(3):
            self.sim.every[me] = self.rng.choice([2, 4, 8])

    def _leave(self) -> None:
        for me in self._some(2):
            if me in self.sim.peers:
                self.sim.leaving.add(me)

    def _join(self) -> None:
        if len(self.sim.disks) < 12:
            self.sim.add(name(len(self.sim.disks)))

    def _put_out(self) -> None:
        """A leader, or anybody: perhaps in the moment in which others have agreed to what it has proposed."""
        leads = [peer.me for peer in self.sim.peers.values() if peer.decider.leader() == peer.me]
        found = leads if leads and self.rng.random() < 0.5 else sorted(self.sim.peers)
        left = len(self.sim.disks) - len(self.sim.gone) - 1
        if found and left >= self.sim.rules.peers and 3 * left > 2 * len(self.sim.disks):
            self.sim.put_out(self.rng.choice(found))

    def _heal(self) -> None:
        self.sim.heal()

    def _hub(self) -> None:
        """All hear one of them, and few hear each other."""
        hub, *_ = self._some()
        for a in sorted(self.sim.disks):
            for b in sorted(self.sim.disks):
                if hub not in (a, b) and a < b and self.rng.random() < 0.6:
                    self.sim.losses[a, b] = self.sim.losses[b, a] = 1.0

    # What is asked.

    def _settle(self) -> None:
        """From now on nothing changes for a while. Some hear each other; the others are silent, or half heard."""
        sim, rng = self.sim, self.rng
        stray, loss, sim.stray, sim.loss = sim.stray, sim.loss, 0.0, 0.0
        sim.heal()
        dirty = rng.random() < 0.5
        groups = self._half_heard() if dirty else self._silent()
        sim.run(2.0 + (STRAY_S if stray else 0.0))  # what was on its way arrives
        bound = CALM_S + (sim.rules.stuck_s * (len(sim.disks) + 1) if dirty else 0)
        for _ in range(2):
            owed = [owing for group in groups for owing in self._must_go_on(group & sim.peers.keys(), dirty)]
            self.owed += len(owed)
            words = f"{'dirty' if dirty else 'calm'}: {[sorted(me[-2:] for me in group) for group in owed]}"
            self._until(self._have_gone_on([me for group in owed for me in group]), bound, words)
        sim.heal()
        sim.stray, sim.loss = stray, loss

    def _have_gone_on(self, who: list[str]) -> Callable[[], bool]:
        peers = self.sim.peers
        before = {me: peers[me].chain.head for me in who}
        return lambda: all(peers[me].chain.head != head for me, head in before.items() if me in peers)

    def _silent(self) -> list[set[str]]:
        """Some are dead, the others on one to three sides of a cut."""
        sides = self.rng.randint(1, 3)
        for me in sorted(self.sim.disks):
            self.sim.side[me] = min(self.rng.randrange(sides + 1), sides - 1)
            if self.rng.random() < 0.25:
                self.sim.kill(me)
        return [{me for me in self.sim.disks if self.sim.side[me] == side} for side in range(sides)]

    def _half_heard(self) -> list[set[str]]:
        """Most hear each other. Each of the others hears some of them or none, and is heard by some or none."""
        sim, rng = self.sim, self.rng
        names = sorted(sim.disks)
        core = set(rng.sample(names, rng.randint(len(names) // 2 + 1, len(names))))
        for me in sorted(core):
            sim.restart(me)
        for a in names:
            for b in names:
                if a not in core or b not in core:
                    sim.losses[a, b] = rng.choice([0.0, 0.5, 1.0, 1.0])
        return [core]

    def _must_go_on(self, core: set[str], dirty: bool) -> list[set[str]]:
        """Of peers that hear each other, those who must get a new record soon, by the branch that they are in: they are
        most of its members, or nobody else is heard and they may part. None, where one may follow either."""
        sim = self.sim
        heads = {me: sim.peers[me].chain.head for me in sorted(core - sim.leaving)}
        past = {h.hash: {record.hash for record in sim.peers[me].chain.past(h.hash)} for me, h in heads.items()}
        tips = [tip for tip in past if not any(tip in past[other] for other in past if other != tip)]
        groups = {tip: {me for me, head in heads.items() if head.hash in past[tip]} for tip in tips}
        if sum(map(len, groups.values())) > len(heads):
            return []
        return [group for tip, group in groups.items() if self._goes_on(heads, tip, group, dirty)]

    def _goes_on(self, heads: dict[str, Record], tip: str, group: set[str], dirty: bool) -> bool:
        members = next(head.members for head in heads.values() if head.hash == tip)
        if majority(group, members):
            return True
        return len(group) >= self.sim.rules.peers if not members else not dirty and self.sim.rules.branches

    def _until(self, true: Callable[[], bool], within_s: float, what: str) -> None:
        sim, began = self.sim, self.sim.now
        while not true():
            if sim.now - began > within_s:
                raise AssertionError(f"no record within {within_s} s; {what}\n{self}")
            sim.run(0.5)

    def _all_is_well(self) -> None:
        sim = self.sim
        sim.heal()
        sim.loss = sim.stray = 0.0
        sim.leaving.clear()
        for me in sorted(sim.disks):
            sim.restart(me)
        head = sim.agree(HEAL_S)
        past = {record.hash for record in next(iter(sim.peers.values())).chain.past(head.hash)}
        assert sim.decided <= past, "something that was decided is lost"
        before = head.round
        self._until(lambda: all(p.chain.head.round > before + 1 for p in sim.peers.values()), CALM_S, "all is well")

    def __str__(self) -> str:
        sim = self.sim
        return "\n".join(
            f"{me[-2:]}: {p.chain.head.kind} {p.chain.head.round} {p.chain.head.hash[:6]} by {p.chain.head.by[-2:]} of "
            f"{[m[-2:] for m in p.chain.head.members]}, {p.decider.mode}, term {p.decider.term} "
            f"wish {p.decider.terms.wish} leader {(p.decider.leader() or '')[-2:]} "
            f"here {sorted(x[-2:] for x in p.decider.here(sim.now))} "
            f"apart {sorted((x[-2:], h[:6]) for x, h in p.decider.branches.apart.items())} "
            f"{'leaving' if me in sim.leaving else ''}"
            for me, p in sorted(sim.peers.items())
        )


def main(first: int, last: int) -> None:
    failed = owed = 0
    for seed in range(first, last):
        storm = Storm(seed)
        try:
            storm.run()
        except Exception as e:
            failed += 1
            where = traceback.extract_tb(e.__traceback__)[-1]
            print(f"seed {seed}: {storm.peers} peers, {storm.sim.rules.branches=}, t {storm.sim.now:.1f}: "
                  f"{type(e).__name__} {where.name}:{where.lineno} {e}", flush=True)  # fmt: skip
        owed += storm.owed
    print(f"{failed} of {last - first} failed; {owed} times records had to go on", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))

"""Who may use which samples. Every position of the data's order is used once in the history, whoever comes and goes.

Records hand positions out to members, who hold them until a part of theirs that counts says that it has used them. What
a peer held that said goodbye is free again. What a peer held that is out of reach is set aside: it may be training on
in a branch of its own. So that two branches hand out different positions too, those that are not handed out yet lie in
lanes, blocks that belong to the members before the cut in turn: a branch takes the lanes of its own members and sets
the others aside. The larger half may hand out a few rounds more before it notices, so the smaller one leaves a gap.
A merge brings both accounts together; who does not come back is forgotten after a while.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from shoal.net.api import PeerId
from shoal.swarm.ranges import Ranges, count, first, minus, union
from shoal.swarm.round_record import Ledger, Part

LEAST_BLOCK = 16
GAP = 2  # times all that was held when the branches parted


def block_of(total: int) -> int:
    """Samples of a lane's block: coarse enough that accounts stay short."""
    return max(LEAST_BLOCK, total // 65536)


def kept(ledger: Ledger) -> Ranges:
    """What is not used yet, of all below the cursor."""
    return union(ledger.free, *ledger.held.values(), *ledger.away.values())


def used(ledger: Ledger) -> Ranges:
    return minus([(0, ledger.cursor)], kept(ledger))


def may_use(ledger: Ledger, peer: PeerId, some: Ranges) -> bool:
    """Whether a part of this peer may be of these samples: its own, or such as another branch has used too."""
    others = minus(kept(ledger), ledger.held.get(peer, ()))
    return not minus(some, [(0, ledger.cursor)]) and minus(some, others) == union(some)


def settle(ledger: Ledger, took: Iterable[Part]) -> Ledger:
    """After parts that count."""
    held = dict(ledger.held)
    for part in took:
        held[part.peer] = minus(held.get(part.peer, ()), part.used)
    return _counted(replace(ledger, held=held))


def go(ledger: Ledger, peers: Iterable[PeerId]) -> Ledger:
    """Members that have said goodbye, or are forgotten: what they had is free."""
    held, away, free = dict(ledger.held), dict(ledger.away), [ledger.free]
    gone = set(peers)
    for peer in gone:
        free += [held.pop(peer, ()), away.pop(peer, ())]
    mine = ledger.mine + tuple(peer for peer in ledger.lanes if peer in gone and peer not in ledger.mine)
    return _counted(replace(ledger, held=held, away=away, free=union(*free), mine=mine))


def lose(ledger: Ledger, members: tuple[PeerId, ...], lost: Iterable[PeerId], total: int, smaller: bool) -> Ledger:
    """Members that are out of reach; `members`: those before. `smaller`: they are most of them."""
    gone = [peer for peer in members if peer in set(lost)]
    if not gone:
        return ledger
    lanes = ledger.lanes or members
    mine = tuple(peer for peer in (ledger.mine if ledger.lanes else members) if peer not in gone)
    held, away = dict(ledger.held), dict(ledger.away)
    for peer in gone:
        away[peer] = union(away.get(peer, ()), held.pop(peer, ()))
    free, cursor = ledger.free, ledger.cursor
    if smaller:
        gap = min(total, cursor + GAP * sum(map(count, ledger.held.values())))
        away[gone[0]] = union(away[gone[0]], free, [(cursor, gap)])
        free, cursor = (), gap
    if not mine:  # nobody is left who owns a lane: better a sample twice than no samples at all
        lanes = ()
    return _counted(replace(ledger, cursor=cursor, held=held, away=away, free=free, lanes=lanes, mine=mine))


def come(ledger: Ledger, peers: Iterable[PeerId]) -> Ledger:
    """Members that are here, anew or again: what was set aside for them is theirs."""
    held, away = dict(ledger.held), dict(ledger.away)
    peers = tuple(peers)
    for peer in peers:
        held[peer] = union(held.get(peer, ()), away.pop(peer, ()))
    mine = ledger.mine + tuple(peer for peer in ledger.lanes if peer in peers and peer not in ledger.mine)
    return _counted(replace(ledger, held=held, away=away, mine=mine))


def hand_out(ledger: Ledger, stock: Mapping[PeerId, int], total: int) -> Ledger:
    """So that each member holds as many as it should; less for all where there are not enough."""
    held = dict(ledger.held)
    short = {peer: max(0, n - count(held.get(peer, ()))) for peer, n in stock.items()}
    short = {peer: n for peer, n in short.items() if 10 * n >= stock[peer]}  # not a few each time
    there = count(ledger.free) + max(0, total - ledger.cursor)
    wanted = sum(short.values())
    for peer in sorted(short):
        n = short[peer] if wanted <= there else -(-short[peer] * there // wanted)
        taken, ledger = _take(ledger, n, total)
        held[peer] = union(held.get(peer, ()), taken)
    return _counted(replace(ledger, held=held))


def merge(a: Ledger, b: Ledger, members: Iterable[PeerId]) -> Ledger:
    """Two branches' accounts. What either has used is used; what both have set aside, or one of them and the other has
    not come to yet, stays aside, or is free if it was for somebody who is here now."""
    used_a, used_b = used(a), used(b)
    held = {
        peer: union(minus(a.held.get(peer, ()), used_b), minus(b.held.get(peer, ()), used_a))
        for peer in {*a.held, *b.held}
    }
    known_a, known_b = (minus([(0, x.cursor)], union(*x.away.values())) for x in (a, b))
    spoken_for = union(used_a, used_b, *held.values())
    here, free = set(members), minus(union(a.free, b.free), spoken_for)
    away: dict[PeerId, Ranges] = {}
    for peer in sorted({*a.away, *b.away}):
        aside = union(minus(a.away.get(peer, ()), known_b), minus(b.away.get(peer, ()), known_a))
        aside = minus(aside, union(spoken_for, free, *away.values()))
        if peer in here:
            free = union(free, aside)
        else:
            away[peer] = aside
    lanes = a.lanes or b.lanes
    mine = tuple(peer for peer in lanes if peer in here)
    return _counted(Ledger(max(a.cursor, b.cursor), 0, free, held, away, lanes, mine))


def _take(ledger: Ledger, n: int, total: int) -> tuple[Ranges, Ledger]:
    taken = first(ledger.free, n)
    ledger = replace(ledger, free=minus(ledger.free, taken))
    n -= count(taken)
    if n <= 0 or ledger.cursor >= total:
        return taken, ledger
    if not ledger.lanes:
        fresh = (ledger.cursor, min(total, ledger.cursor + n))
        return union(taken, [fresh]), replace(ledger, cursor=fresh[1])
    away, cursor, block = dict(ledger.away), ledger.cursor, block_of(total)
    while n > 0 and cursor < total:
        end = min(total, (cursor // block + 1) * block)
        owner = ledger.lanes[cursor // block % len(ledger.lanes)]
        if owner in ledger.mine:
            end = min(end, cursor + n)
            taken, n = union(taken, [(cursor, end)]), n - (end - cursor)
        else:
            away[owner] = union(away.get(owner, ()), [(cursor, end)])
        cursor = end
    return taken, replace(ledger, cursor=cursor, away=away)


def _counted(ledger: Ledger) -> Ledger:
    """In good order. Lanes are needed for as long as somebody is away who owns one."""
    if ledger.lanes and set(ledger.lanes) <= set(ledger.mine):
        ledger = replace(ledger, lanes=(), mine=())
    ledger = replace(ledger, held=_tidy(ledger.held), away=_tidy(ledger.away))
    return replace(ledger, done=ledger.cursor - count(kept(ledger)))


def _tidy(ranges: Mapping[PeerId, Ranges]) -> dict[PeerId, Ranges]:
    return {peer: some for peer, some in sorted(ranges.items()) if some}

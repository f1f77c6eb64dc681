"""Who may use which samples. Every position of the data's order is used once in the history, whoever comes and goes.

Records hand positions out to members, who hold them until a part of theirs that counts says that it has used them. What
a peer held that said goodbye is free again. What a peer held that is out of reach is set aside: it may be training on
in a branch of its own. So that two branches hand out different positions too, those that are not handed out yet lie in
lanes, blocks that belong to the members before the cut in turn; a branch takes the lanes of its own members and sets
the others aside. A merge brings both accounts together; who does not come back is forgotten after a while.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from shoal.fleet.net.api import PeerId
from shoal.fleet.swarm.ranges import Range, Ranges, count, first, minus, union
from shoal.fleet.swarm.record import Ledger, Part

LEAST_BLOCK = 16


def block_of(total: int) -> int:
    """Samples of a lane's block: coarse enough that accounts stay short."""
    return max(LEAST_BLOCK, total // 65536)


def settle(ledger: Ledger, took: Iterable[Part]) -> Ledger:
    """After parts that count."""
    held, done = dict(ledger.held), ledger.done
    for part in took:
        held[part.peer] = minus(held.get(part.peer, ()), part.used)
        done += count(part.used)
    return replace(ledger, held=_tidy(held), done=done)


def go(ledger: Ledger, peers: Iterable[PeerId]) -> Ledger:
    """Members that have said goodbye, or are forgotten: what they had is free."""
    held, away, free = dict(ledger.held), dict(ledger.away), [ledger.free]
    for peer in peers:
        free += [held.pop(peer, ()), away.pop(peer, ())]
    gone = set(peers)
    mine = ledger.mine + tuple(peer for peer in ledger.lanes if peer in gone and peer not in ledger.mine)
    return _settled(replace(ledger, held=held, away=away, free=union(*free), mine=mine))


def lose(ledger: Ledger, members: tuple[PeerId, ...], lost: Iterable[PeerId], total: int) -> Ledger:
    """Members that are out of reach; `members`: those before."""
    gone = set(lost)
    if not gone:
        return ledger
    lanes = ledger.lanes or members
    mine = tuple(peer for peer in (ledger.mine if ledger.lanes else members) if peer not in gone)
    held, away = dict(ledger.held), dict(ledger.away)
    for peer in gone:
        away[peer] = union(away.get(peer, ()), held.pop(peer, ()))
    if not mine:  # nobody is left who owns a lane: better a sample twice than no samples at all
        return replace(ledger, held=held, away=_tidy(away), lanes=(), mine=())
    free, others = _split(ledger.free, lanes, mine, total)
    for peer, some in others.items():
        away[peer] = union(away.get(peer, ()), some)
    return replace(ledger, held=held, away=_tidy(away), free=free, lanes=lanes, mine=mine)


def come(ledger: Ledger, peers: Iterable[PeerId]) -> Ledger:
    """Members that are here, anew or again: what was set aside for them is theirs."""
    held, away = dict(ledger.held), dict(ledger.away)
    peers = tuple(peers)
    for peer in peers:
        held[peer] = union(held.get(peer, ()), away.pop(peer, ()))
    mine = ledger.mine + tuple(peer for peer in ledger.lanes if peer in peers and peer not in ledger.mine)
    return _settled(replace(ledger, held=_tidy(held), away=away, mine=mine))


def hand_out(ledger: Ledger, stock: Mapping[PeerId, int], total: int) -> Ledger:
    """So that each member holds as many as it should; less for all where there are not enough."""
    held = dict(ledger.held)
    short = {peer: max(0, n - count(held.get(peer, ()))) for peer, n in stock.items()}
    short = {peer: n for peer, n in short.items() if 2 * n > stock[peer]}  # not a few each time
    there = count(ledger.free) + max(0, total - ledger.cursor)
    wanted = sum(short.values())
    for peer in sorted(short):
        n = short[peer] if wanted <= there else -(-short[peer] * there // wanted)
        taken, ledger = _take(ledger, n, total)
        held[peer] = union(held.get(peer, ()), taken)
    return replace(ledger, held=_tidy(held))


def merge(a: Ledger, b: Ledger, members: Iterable[PeerId], before: int) -> Ledger:
    """Two branches' accounts; `before`: samples that were used when they parted. What both have set aside, or one of
    them and the other has not come to yet, stays aside; of the rest one branch knows what became of it."""
    known_a, known_b = (minus([(0, x.cursor)], union(*x.away.values())) for x in (a, b))
    here, free = set(members), [a.free, b.free]
    away: dict[PeerId, Ranges] = {}
    seen: Ranges = ()
    for peer in sorted({*a.away, *b.away}):
        aside = union(minus(a.away.get(peer, ()), known_b), minus(b.away.get(peer, ()), known_a))
        aside = minus(aside, seen)
        seen = union(seen, aside)
        if peer in here:
            free.append(aside)
        else:
            away[peer] = aside
    held = {peer: union(a.held.get(peer, ()), b.held.get(peer, ())) for peer in {*a.held, *b.held}}
    lanes = a.lanes or b.lanes
    mine = tuple(peer for peer in lanes if peer in here)
    merged = Ledger(max(a.cursor, b.cursor), a.done + b.done - before, union(*free), _tidy(held), away, lanes, mine)
    return _settled(merged)


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


def _split(
    free: Ranges, lanes: tuple[PeerId, ...], mine: tuple[PeerId, ...], total: int
) -> tuple[Ranges, dict[PeerId, Ranges]]:
    """Free positions by the lane that they lie in: ours, and the others' by owner."""
    block = block_of(total)
    ours: list[Range] = []
    others: dict[PeerId, list[Range]] = {}
    for a, b in free:
        while a < b:
            end = min(b, (a // block + 1) * block)
            owner = lanes[a // block % len(lanes)]
            (ours if owner in mine else others.setdefault(owner, [])).append((a, end))
            a = end
    return union(ours), {peer: union(some) for peer, some in others.items()}


def _settled(ledger: Ledger) -> Ledger:
    """Lanes are needed for as long as somebody is away who owns one."""
    if ledger.lanes and set(ledger.lanes) <= set(ledger.mine):
        return replace(ledger, lanes=(), mine=(), away=_tidy(ledger.away))
    return replace(ledger, away=_tidy(ledger.away))


def _tidy(ranges: Mapping[PeerId, Ranges]) -> dict[PeerId, Ranges]:
    return {peer: some for peer, some in sorted(ranges.items()) if some}

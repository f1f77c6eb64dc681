"""What a record contains, and what others check before they agree to it. Pure functions of the records before it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from statistics import median

from shoal.net.api import PeerId
from shoal.swarm import sample_ledger as accounts
from shoal.swarm.chain import Chain
from shoal.swarm.ranges import count, minus, union
from shoal.swarm.round_record import Kind, Part, Record

STOCK_ROUNDS = 5  # samples that a peer holds: for the round that it trains, the next one, and some to spare
FIRST_STEPS = 64  # before a peer's speed is known
FASTER = 8  # times as many samples as in its last round
REMEMBERED = 0.7  # of a peer's standing, from one round to the next


def next_record(
    head: Record,
    kind: Kind,
    members: tuple[PeerId, ...],
    took: Iterable[Part],
    *,
    leaving: Iterable[PeerId],
    out: Iterable[PeerId] = (),
    forgotten: Iterable[PeerId],
    total: int,
    batch: int,
    round_s: float,
    state: str | None,
    by: PeerId,
    now: float,
) -> Record:
    """A round, or a branch. Parts come in the order of their peers' keys. `out`: members that were put out."""
    took = tuple(sorted(took, key=lambda part: part.peer))
    put_out = set(out)
    goodbye = {peer for peer in head.members if peer not in members and peer in {*leaving, *put_out}}
    lost = {peer for peer in head.members if peer not in members and peer not in goodbye}
    joined = tuple(peer for peer in members if peer not in head.members)
    ledger = accounts.settle(head.ledger, took)
    ledger = accounts.lose(ledger, head.members, sorted(lost), total, smaller=kind == "branch")
    ledger = accounts.go(ledger, sorted(goodbye | (set(forgotten) & set(ledger.away))))
    ledger = accounts.come(ledger, joined)
    ledger = accounts.hand_out(ledger, _stock(members, took, batch, round_s), total)
    return Record(
        kind,
        head.round + 1,
        (head.hash,),
        members,
        took,
        state,
        _standing(head, took),
        ledger,
        head.tokens + sum(part.targets for part in took),
        left={peer: _why(peer, put_out, goodbye) for peer in sorted(lost | goodbye)},
        joined=joined,
        time=round(now, 3),
        by=by,
    )


def _why(peer: PeerId, put_out: set[PeerId], goodbye: set[PeerId]) -> str:
    return "put out" if peer in put_out else "goodbye" if peer in goodbye else "not heard"


def merge_record(
    chain: Chain, parents: tuple[str, ...], members: tuple[PeerId, ...], by: PeerId, now: float, total: int
) -> Record:
    """Both heads become one. The parents stand in the order of their names, so that both sides make the same sums."""
    parents = tuple(sorted(parents))
    a, b = (chain.get(parent) for parent in parents)
    before = chain.common(a.hash, b.hash)
    ledger = accounts.merge(a.ledger, b.ledger, members)
    known = tuple(dict.fromkeys([*a.members, *b.members]))
    lost = [peer for peer in known if peer not in members]
    ledger = accounts.come(accounts.lose(ledger, known, lost, total, smaller=False), members)
    return Record(
        "merge",
        max(a.round, b.round) + 1,
        parents,
        members,
        standing={**a.standing, **b.standing},
        ledger=ledger,
        tokens=a.tokens + b.tokens - before.tokens,
        weights=(a.tokens - before.tokens, b.tokens - before.tokens),
        left=dict.fromkeys(lost, "not heard"),
        time=round(now, 3),
        by=by,
    )


def objection(
    record: Record,
    chain: Chain,
    *,
    total: int,
    admitted: Callable[[PeerId], bool],
    signed: Callable[[Part], bool],
    most_bytes: int,
    most_tokens: int,
    state: str | None,
) -> str | None:
    """Why nobody should agree to a record whose parents are known. None: it is as it should be. `most_tokens`: of a
    sample."""
    strangers = [peer for peer in record.members if not admitted(peer)]
    if strangers:
        return f"{strangers[0][:8]} is to be a member and was not admitted"
    if not any(record.by in known for known in (record.members, *(chain.get(x).members for x in record.parents))):
        return "whoever made it is no member"
    if record.kind == "merge":
        expected = merge_record(chain, record.parents, record.members, record.by, record.time, total)
        return None if expected == record else "it is not what its two branches make"
    head = chain.get(record.parent)
    if state is not None and record.state is not None and state != record.state:
        return f"its weights are {record.state[:12]} and ours {state[:12]}"
    for part in record.took:
        why = _part_objection(part, record, head, most_bytes, most_tokens)
        if why or not signed(part):
            return f"the part of {part.peer[:8]}: {why or 'its signature is wrong'}"
    return _sums(record, head, total)


def _part_objection(part: Part, record: Record, head: Record, most_bytes: int, most_tokens: int) -> str | None:
    if part.round != record.round:
        return f"of round {part.round}"
    if part.peer not in head.members:
        return "of no member"
    if part.size > most_bytes:
        return f"{part.size} bytes, where at most {most_bytes} are allowed"
    if part.tokens > most_tokens * count(part.used):
        return f"{part.tokens} tokens, where its samples have {most_tokens * count(part.used)} at most"
    if part.targets > part.tokens:
        return f"{part.targets} targets among {part.tokens} tokens"
    if not accounts.may_use(head.ledger, part.peer, part.used):
        return "of samples that it does not hold"
    return None


def _sums(record: Record, head: Record, total: int) -> str | None:
    """No sample appears from nowhere, or is lost."""
    new, old = record.ledger, head.ledger
    if record.tokens != head.tokens + sum(part.targets for part in record.took):
        return "its sums are wrong"
    kept = accounts.kept(new)
    fresh = [(old.cursor, new.cursor)]
    used = union(*(part.used for part in record.took))
    good = old.cursor <= new.cursor <= total and new.done == new.cursor - count(kept)
    if not good or minus(union(accounts.kept(old), fresh), union(kept, used)) or minus(kept, [(0, new.cursor)]):
        return "its account of the samples is wrong"
    return None


def _stock(members: tuple[PeerId, ...], took: tuple[Part, ...], batch: int, round_s: float) -> dict[PeerId, int]:
    """By what each has done last; who has brought nothing begins with what is usual, at first a little."""
    does = {part.peer: in_a_round(count(part.used), part.seconds, round_s) for part in took if part.used}
    usual = int(median(does.values())) if does else FIRST_STEPS * batch // STOCK_ROUNDS
    return {peer: STOCK_ROUNDS * max(batch, does.get(peer, usual)) for peer in members}


def in_a_round(samples: int, seconds: float, round_s: float) -> int:
    """Samples that a peer would use in a whole round which has used these in so many seconds of computing: its last one
    may have been a short one. At most a few times as many, since a first step may tell little."""
    return max(samples, min(FASTER * samples, int(samples * round_s / max(seconds, 1e-6))))


def _standing(head: Record, took: tuple[Part, ...]) -> dict[PeerId, float]:
    """What others' losses say of each peer's parts: above 0, they do harm."""
    said: dict[PeerId, list[float]] = {}
    for part in took:
        for peer, score in part.scores.items():
            if peer != part.peer and peer in head.members:
                said.setdefault(peer, []).append(score)
    standing = {peer: REMEMBERED * x for peer, x in head.standing.items() if abs(x) > 1e-4}
    for peer, scores in said.items():
        standing[peer] = standing.get(peer, 0.0) + (1 - REMEMBERED) * median(scores)
    return {peer: round(x, 6) for peer, x in sorted(standing.items())}


def for_trainer(record: Record) -> dict[str, object]:
    """As the trainer is told of it: with each part goes what is known of its peer."""
    standing: Mapping[PeerId, float] = record.standing
    body = record.body()
    took = [{**part, "score": standing.get(part["peer"])} for part in body["took"]]
    return {**body, "hash": record.hash, "took": took, "ledger": {"done": record.ledger.done}}

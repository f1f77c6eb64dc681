"""Broken and hostile parts do no harm, and honest ones are not taken for them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from shoal.codec import codec
from shoal.swarm.outer.robust import SAMPLE, Verdict, _sample
from shoal.swarm.outer.rule import Rule
from tests.swarm.outer.quadratic import COUNT, Peer, record

TOPK, INT8 = Rule(lr=1.0), Rule("int8", lr=1.0)
Attack = Callable[[np.ndarray, np.random.Generator], np.ndarray]
ATTACKS: dict[str, Attack] = {
    "garbage": lambda v, r: r.normal(size=COUNT).astype(np.float32),
    "the same garbage": lambda v, r: np.random.default_rng(1).normal(size=COUNT).astype(np.float32),
    "scaled": lambda v, r: v * 100,
    "flipped": lambda v, r: -v,
    "flipped and scaled": lambda v, r: v * -10,
    "one huge value": lambda v, r: np.where(np.arange(COUNT) == 5, np.float32(1e6), v).astype(np.float32),
}


def run(rule: Rule, attack: Attack | None, rounds: int = 4) -> tuple[float, list[Verdict]]:
    """(loss, the last round's verdicts) of six honest peers and two that attack."""
    peers = [Peer(f"peer{i}", rule, i) for i in range(8)]
    random, verdicts = np.random.default_rng(3), []
    for round in range(rounds):
        for peer in peers:
            peer.train()
        parts = {peer.name: peer.part(round) for peer in peers}
        if attack is not None:
            for peer in peers[:2]:
                values = np.zeros(COUNT, np.float32)
                peer.outer.codec.add(parts[peer.name], values, 1.0)
                parts[peer.name] = codec(rule.codec).encode(attack(values, random), None, 0.0)
        applied = [peer.outer.apply(record(round, parts), parts) for peer in peers]
        for peer, what in zip(peers, applied, strict=True):
            for where, by in peer.local.follow(what):
                peer.weights[where] += by
        verdicts = applied[0].verdicts
    assert len({peer.outer.digest() for peer in peers}) == 1
    return peers[2].loss, verdicts


@pytest.mark.parametrize(
    ("rule", "attacks"),
    # What is judged are the numbers, whatever they came in: one attack of each kind is enough for another codec.
    [
        pytest.param(TOPK, list(ATTACKS), id="topk"),
        pytest.param(
            INT8, ["the same garbage", "flipped and scaled", "one huge value"], id="int8", marks=pytest.mark.slow
        ),
    ],
)
def test_two_of_eight_hostile_peers_do_no_harm(rule: Rule, attacks: list[str]) -> None:
    honest, verdicts = run(rule, None)
    assert not any(v.out for v in verdicts)
    for name in attacks:
        loss, verdicts = run(rule, ATTACKS[name])
        assert loss < 1.1 * honest, name
        if name in ("garbage", "the same garbage", "flipped", "flipped and scaled"):
            assert [v.peer for v in verdicts if v.out] == ["peer0", "peer1"], name


def test_without_the_checks_they_do() -> None:
    rule = Rule(lr=1.0, robust=False)
    honest, _ = run(rule, None)
    assert run(rule, ATTACKS["scaled"])[0] > 2 * honest


def test_a_part_that_does_not_decode_or_makes_the_loss_worse_is_left_out() -> None:
    peers = [Peer(f"peer{i}", Rule(), i) for i in range(4)]
    for peer in peers:
        peer.train()
    parts = {peer.name: peer.part(0) for peer in peers}
    parts["peer0"] = parts["peer0"][:100]
    verdicts = peers[1].outer.apply(record(0, parts, peer3=0.5), parts).verdicts
    assert [v.peer for v in verdicts if v.out] == ["peer0", "peer3"]
    assert sum(v.weight for v in verdicts) == pytest.approx(1)
    longer = {"peer1": parts["peer1"], "peer2": codec("topk").encode(np.ones(2 * COUNT, np.float32), None, 0.0)}
    assert peers[1].outer.apply(record(1, longer), longer).verdicts[1].out


def test_all_parts_left_out_change_nothing() -> None:
    peer = Peer("peer0", Rule(), 0)
    before = peer.outer.digest()
    peer.outer.apply(record(0, {"peer0": b"junk"}), {"peer0": b"junk"})
    assert peer.outer.digest() == before


def test_tokens_that_are_only_claimed_count_for_little() -> None:
    peers = [Peer(f"peer{i}", Rule(), i) for i in range(5)]
    for peer in peers:
        peer.train()
    parts = {peer.name: peer.part(0) for peer in peers}
    said = record(0, parts)
    said["took"][0]["targets"] = 10**15
    verdicts = peers[0].outer.apply(said, parts).verdicts
    assert max(v.weight for v in verdicts) == pytest.approx(0.5)


def test_the_sample_of_a_large_model_follows_from_the_parts() -> None:
    one, other = ([{"blob": blob}] for blob in "ab")
    count = 8 * SAMPLE
    assert len(_sample(one, count)) * 4096 == SAMPLE
    assert np.array_equal(_sample(one, count), _sample(one, count))
    assert not np.array_equal(_sample(one, count), _sample(other, count))

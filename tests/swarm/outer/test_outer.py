"""The outer step: the same bits everywhere, nothing counted twice, whoever is late; snapshots and merges."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shoal.codec import codec
from shoal.spec.swarm import Swarm
from shoal.swarm.outer.merge import merge
from shoal.swarm.outer.outer import Outer
from shoal.swarm.outer.peer_side import Local, add
from shoal.swarm.outer.rule import Rule
from shoal.swarm.outer.state_files import ABOUT, WEIGHTS, BadSnapshot, load, save
from tests.swarm.outer.quadratic import COUNT, Peer, record

RULES = [
    Rule(lr=1.0),
    Rule("int8", lr=0.7, momentum=0.6),
    Rule("2bit", lr=1.0, fragments=3),
    Rule("topk", chunk=1024, keep=32, lr=1.0, fragments=2),
]


def swarm(rule: Rule, size: int = 4) -> list[Peer]:
    return [Peer(f"peer{i}", rule, i) for i in range(size)]


@pytest.mark.parametrize("rule", RULES, ids=lambda r: f"{r.codec}-{r.fragments}")
def test_all_peers_have_the_same_bits_and_learn(rule: Rule) -> None:
    peers = swarm(rule)
    first = peers[0].loss
    for round in range(12):
        for peer in peers:
            peer.train()
        parts = {peer.name: peer.part(round) for peer in peers}
        for i, peer in enumerate(peers):
            if i % 2:  # the record comes while the next round is trained
                peer.train(2)
            peer.apply(record(round, parts), parts)
    assert len({peer.outer.digest() for peer in peers}) == 1
    assert peers[0].loss < first / 2


def test_weights_are_theta_and_progress_however_late_records_are() -> None:
    a, b = swarm(Rule("bf16", lr=0.5), 2)
    sent, progress = [], np.zeros(COUNT, np.float32)
    for round in range(3):
        before = a.weights.copy()
        a.train()
        progress = a.weights - before
        b.train()
        sent.append({"a": a.part(round), "b": b.part(round)})
    assert np.allclose(progress, -_decoded(sent[-1]["a"]), atol=0.02)  # the last part is the last round's alone
    before = a.weights.copy()
    a.train(1)
    new = a.weights - before
    for round, parts in enumerate(sent):
        a.apply(record(round, parts), parts)
    assert np.allclose(a.weights, a.outer.theta + new, atol=1e-5)


def test_a_returned_part_travels_with_the_next_one() -> None:
    (peer,) = swarm(Rule("bf16", feedback=0.0, lr=1.0), 1)
    peer.train()
    late = peer.part(0)
    peer.apply({"kind": "round", "round": 0, "took": []}, {})
    peer.local.returned(0, late)
    assert np.array_equal(peer.weights, peer.outer.theta)
    peer.train()
    progress = peer.outer.theta - peer.weights
    both = _decoded(peer.part(1))
    assert np.allclose(both, progress + _decoded(late), atol=0.02)
    peer.train()
    assert not np.allclose(_decoded(peer.part(2)), both, atol=0.02)  # once


def test_weights_that_are_no_numbers_are_not_handed_in() -> None:
    (peer,) = swarm(Rule(), 1)
    peer.weights[3] = np.nan
    with pytest.raises(ValueError, match="not finite"):
        peer.part(0)
    peer.weights[:] = 0
    assert not _decoded(peer.part(0), "topk").any()  # and nothing of it is left behind


def test_order_of_records_decides_and_not_of_arrival() -> None:
    peers = swarm(Rule(), 3)
    for peer in peers:
        peer.train()
    parts = {peer.name: peer.part(0) for peer in peers}
    said = record(0, parts)
    peers[0].apply(said, parts)
    peers[1].apply(said, dict(reversed(parts.items())))
    assert peers[0].outer.digest() == peers[1].outer.digest()


def test_a_snapshot_is_the_state_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    rule = Rule("int8", momentum=0.9)
    (peer,) = swarm(rule, 1)
    peer.train()
    parts = {peer.name: peer.part(0)}
    peer.apply(record(0, parts), parts)
    digest = save(peer.outer, tmp_path / "a")
    save(peer.outer.copy(), tmp_path / "b")
    assert (tmp_path / "a" / WEIGHTS).read_bytes() == (tmp_path / "b" / WEIGHTS).read_bytes()
    found = load(tmp_path / "a", rule, COUNT, digest)
    assert (found.digest(), found.round) == (digest, 0)

    with pytest.raises(BadSnapshot, match="another run"):
        load(tmp_path / "a", rule, COUNT + 1)
    save(Outer(peer.outer.theta, Rule()), tmp_path / "c")
    with pytest.raises(BadSnapshot, match="momentum and theta"):
        load(tmp_path / "c", rule, COUNT)
    data = bytearray((tmp_path / "a" / WEIGHTS).read_bytes())
    data[-5] ^= 1
    (tmp_path / "a" / WEIGHTS).write_bytes(data)
    with pytest.raises(BadSnapshot, match="was expected"):
        load(tmp_path / "a", rule, COUNT, digest)
    (tmp_path / "b" / WEIGHTS).write_bytes(data[:1000])
    with pytest.raises(BadSnapshot, match="cannot be read"):
        load(tmp_path / "b", rule, COUNT)
    (tmp_path / "b" / ABOUT).write_text("{")
    with pytest.raises(BadSnapshot, match="cannot be read"):
        load(tmp_path / "b", rule, COUNT)


def test_halves_merge_to_the_ancestor_and_both_progresses_by_tokens() -> None:
    rule = Rule("bf16", lr=1.0, robust=False)
    base = Outer(np.zeros(COUNT, np.float32), rule)
    ours, theirs = base.copy(), base.copy()
    ours.theta += 1
    theirs.theta += 3
    local = Local(base.copy())
    weights = np.full(COUNT, 5.0, np.float32)
    local.part(7, weights)  # under way, and in the merged history
    before = local.outer.theta.copy()
    merged = merge(base, [ours, theirs], [300, 100], 7)
    assert np.allclose(merged.theta, 1.5)
    add(local.follow_merge(7, before, merged.theta), weights)
    assert np.allclose(weights, 1.5)
    assert merge(ours.copy(), [ours, theirs], [0, 0], 7).theta[0] == 2


def test_fragments_cover_everything_once_and_cut_no_chunk() -> None:
    for count in (1, 4096, 40_000, 1_000_001):
        for rule in (Rule(fragments=3), Rule(chunk=10_000, fragments=7)):
            cut = [rule.fragment(r, count) for r in range(rule.fragments)]
            assert [s.start for s in cut[1:]] == [s.stop for s in cut[:-1]]
            assert cut[-1].stop == count
            assert replace(rule).fragment(rule.fragments, count) == cut[0]


def _decoded(payload: bytes, name: str = "bf16") -> np.ndarray:
    into = np.zeros(COUNT, np.float32)
    codec(name).add(payload, into, 1.0)
    return into


def test_outer_rates_follow_the_codec_unless_they_are_said() -> None:
    sparse, dense = Rule.of(Swarm()), Rule.of(Swarm(codec="2bit"))
    assert sparse.codec == "topk"
    assert sparse.lr > 1 > dense.lr
    assert dense.momentum > sparse.momentum == 0
    assert dense.feedback == 1 > sparse.feedback
    said = Swarm(codec="2bit", outer_lr=0.5, outer_momentum=0.0, feedback=0.0)
    assert (Rule.of(said).lr, Rule.of(said).momentum, Rule.of(said).feedback) == (0.5, 0.0, 0.0)
    assert Rule.of(dense.stated(Swarm(codec="2bit"))) == dense


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_snapshot_that_holds_what_is_no_number_is_refused_with_its_own_digest(tmp_path: Path, wrong: float) -> None:
    outer = Outer(np.ones(COUNT, np.float32), Rule())
    outer.theta[3] = wrong
    digest = save(outer, tmp_path / "state")
    with pytest.raises(BadSnapshot, match=r"theta of .* holds what is not finite"):
        load(tmp_path / "state", Rule(), COUNT, digest)

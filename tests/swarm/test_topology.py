"""Regions, routes and predictions, from made-up links."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from shoal.errors import UsageError
from shoal.net.api import LinkState, PeerId
from shoal.swarm.topology import Routes, routes
from shoal.swarm.topology_picture import draw, picture
from shoal.swarm.topology_predict import exchange_s, predict

Matrix = dict[PeerId, dict[PeerId, LinkState]]
Kind = Callable[[PeerId, PeerId], tuple[float, float] | None]  # seconds there and back, bytes/s; None: no link
PART = 20_000_000

# A data centre, a campus and three homes; unlike inside, and unlike between.
PLACES = {"d1": 0, "d2": 0, "d3": 0, "c1": 1, "c2": 1, "h1": 2, "h2": 2, "h3": 2}
INSIDE = [(0.0005, 600e6), (0.004, 60e6), (0.025, 10e6)]
BETWEEN = {(0, 1): (0.09, 8e6), (0, 2): (0.14, 4e6), (1, 2): (0.11, 3e6)}


def three(a: PeerId, b: PeerId) -> tuple[float, float]:
    i, j = sorted((PLACES[a], PLACES[b]))
    return INSIDE[i] if i == j else BETWEEN[i, j]


def matrix(peers: list[PeerId], kind: Kind, noise: float = 0.0, seed: int = 0) -> Matrix:
    rng = random.Random(seed)

    def about(x: float) -> float:
        return x * (1 + noise) ** rng.uniform(-1, 1)

    links: Matrix = {}
    for a in peers:
        for b in peers:
            if a != b:
                found = kind(a, b)
                if found is None:
                    state = LinkState(b, None)
                else:
                    state = LinkState(b, "tcp", about(found[0]), 0.0, about(found[1]), about(found[1]))
                links.setdefault(a, {})[b] = state
    return links


def made(kind: Kind, peers: list[PeerId], noise: float = 0.0, seed: int = 0, before: Routes | None = None) -> Routes:
    return routes(peers, matrix(peers, kind, noise, seed), dict.fromkeys(peers, PART), before)


def groups(found: Routes) -> list[str]:
    return [" ".join(region) for region in found.regions]


def test_three_unlike_regions_are_found_and_a_part_crosses_once_to_each() -> None:
    found = made(three, list(PLACES), noise=0.3)
    assert groups(found) == ["c1 c2", "d1 d2 d3", "h1 h2 h3"]
    assert found.crossing_bytes() == 2 * len(PLACES) * PART
    ratio = found.all_to_all_bytes() / found.crossing_bytes()
    print(f"between regions: {ratio:.2f} times less than all to all")
    assert ratio == pytest.approx((3 * 5 + 2 * 6 + 3 * 5) / (2 * 8))


def test_every_peer_gets_every_part_and_its_owner_is_always_asked_in_the_end() -> None:
    found = made(three, list(PLACES))
    for owner in PLACES:
        have = {owner}
        for _ in PLACES:  # by first choices alone
            have |= {peer for peer in PLACES if peer != owner and found.best(peer, owner) in have}
        assert have == set(PLACES)
        for receiver in PLACES:
            sources = found.sources(receiver, owner)
            assert sorted(sources) == sorted(p for p in PLACES if p != receiver) if receiver != owner else not sources


def test_gateways_share_the_work_and_fellows_wait_for_theirs() -> None:
    found = made(three, list(PLACES))
    for region in found.regions:
        outside = [owner for owner in PLACES if owner not in region]
        each = [sum(g == peer for (i, _), g in found.gateways.items() if found.regions[i] == region) for peer in region]
        assert sum(each) == len(outside)
        assert max(each) - min(each) <= 1
    gateway = found.gateways[found.region("h1"), "d1"]
    fellow = next(peer for peer in ("h1", "h2", "h3") if peer != gateway)
    assert found.choice(gateway, "d1").first == ("d1",)
    choice = found.choice(fellow, "d1")
    assert choice.first[0] == gateway
    assert set(choice.first) == {"h1", "h2", "h3"} - {fellow}
    assert choice.later[0] == "d1"
    assert PART / 4e6 < choice.wait_s < 60


@pytest.mark.parametrize("count", [1, 2, 3, 8, 20])
def test_links_that_are_alike_make_one_region(count: int) -> None:
    peers = [f"p{i:02}" for i in range(count)]
    found = made(lambda a, b: (0.1, 12e6), peers, noise=0.5)
    assert len(found.regions) == 1
    assert found.crossing_bytes() == found.all_to_all_bytes() == 0
    if count > 2:
        assert found.choice("p00", "p02").first[0] == "p02"
        assert len(found.choice("p00", "p02").first) == count - 1


def test_one_far_peer_does_not_hide_the_regions_of_the_others() -> None:
    def kind(a: PeerId, b: PeerId) -> tuple[float, float]:
        return (0.6, 0.1e6) if "x" in (a, b) else three(a, b)

    assert groups(made(kind, [*PLACES, "x"])) == ["c1 c2", "d1 d2 d3", "h1 h2 h3", "x"]


def test_measured_again_nothing_moves_and_a_changed_link_does() -> None:
    """A peer whose links lie near the border would be in one region now and in the other then."""
    peers = ["a1", "a2", "a3", "b1", "b2", "b3", "m"]

    def border(a: PeerId, b: PeerId) -> tuple[float, float]:
        if "m" in (a, b):
            return (0.03, 10e6) if "a" in a + b else (0.1, 8e6)
        return (0.01, 10e6) if a[0] == b[0] else (0.1, 8e6)

    def moved(a: PeerId, b: PeerId) -> tuple[float, float]:
        if "m" in (a, b):
            return (0.01, 10e6) if "b" in a + b else (0.1, 8e6)
        return border(a, b)

    seen, gateways = set(), set()
    found = made(border, peers)
    for seed in range(40):
        found = made(border, peers, noise=0.35, seed=seed, before=found)
        seen.add(found.regions)
        gateways.add(tuple(sorted(found.gateways.items())))
    assert len(seen) == 1
    alone = [made(border, peers, noise=0.35, seed=seed) for seed in range(40)]
    assert len({each.regions for each in alone}) > 1
    assert len({tuple(sorted(each.gateways.items())) for each in alone}) > 4 * len(gateways)
    assert groups(made(moved, peers, before=found)) == ["a1 a2 a3", "b1 b2 b3 m"]


def test_a_bad_link_between_two_regions_is_gone_around() -> None:
    def kind(a: PeerId, b: PeerId) -> tuple[float, float]:
        return (0.3, 0.2e6) if {PLACES[a], PLACES[b]} == {1, 2} else three(a, b)

    found = made(kind, list(PLACES))
    gateway = found.gateways[found.region("h1"), "c1"]
    assert found.best(gateway, "c1") in ("d1", "d2", "d3")
    assert found.arrives_s(gateway, "c1") < PART / 3e6
    assert found.crossing_bytes() == 2 * len(PLACES) * PART


def test_who_cannot_be_reached_is_asked_last_and_unknown_links_are_guessed() -> None:
    def kind(a: PeerId, b: PeerId) -> tuple[float, float] | None:
        return None if {a, b} in ({"d1", "h1"}, {"d1", "h2"}) else three(a, b)

    found = made(kind, list(PLACES))
    assert found.gateways[found.region("h1"), "d1"] == "h3"
    assert found.choice("h1", "d1").first == ("h3", "h2")
    blind = routes(list(PLACES), {}, {})
    assert len(blind.regions) == 1
    assert len(blind.sources("d1", "h1")) == 7
    partly = matrix(list(PLACES), three)
    del partly["d1"], partly["h2"]["d1"]  # neither says anything of that link
    assert groups(routes(list(PLACES), partly, dict.fromkeys(PLACES, PART))) == ["c1 c2", "d1 d2 d3", "h1 h2 h3"]


def test_prediction_follows_the_links_the_round_and_the_overlap() -> None:
    found = made(three, list(PLACES))
    takes = exchange_s(found)
    assert takes["d1"] < takes["h1"]
    slowest = max(takes.values())
    alone = predict(found, 60.0, overlap=False)
    assert alone.exchange_s == slowest
    assert alone.peers["h1"].expected == pytest.approx(60 / (60 + takes["h1"]), rel=1e-3)
    assert predict(found, slowest + 1, overlap=True).busy == pytest.approx(1.0)
    rising = [predict(found, s, overlap=True).busy for s in (0.5, 1.0, 3.0, 9.0)]
    assert all(a < b for a, b in pairwise(rising))
    assert predict(found, 5.0).low <= predict(found, 5.0).busy <= predict(found, 5.0).high
    assert predict(made(three, ["d1"]), 5.0).busy == 1.0


def test_regions_are_quicker_than_all_to_all_where_crossing_links_are_shared() -> None:
    """The line between two places is one: what each flow gets of it is its share."""
    found = made(three, list(PLACES))
    crossing = {(i, j): 0 for i in range(3) for j in range(3) if i != j}
    for flow in found.flows():
        if (pair := (PLACES[flow.source], PLACES[flow.receiver])) in crossing:
            crossing[pair] += flow.size
    members = [list(PLACES.values()).count(i) for i in range(3)]
    for (i, j), carried in crossing.items():
        assert carried == members[i] * PART < members[i] * members[j] * PART


def test_pictures_in_words_and_drawn(tmp_path: Path) -> None:
    found = made(three, list(PLACES))
    told = picture(found)
    assert "8 peers in 3 regions; 305.2 MiB cross between them in a round, 801.1 MiB if all sent to all" in told
    assert "A  c1, c2  (4 ms, 480 Mbit/s" in told
    assert "A-B  90 ms, 64 Mbit/s" in told
    for name in ("t.svg", "t.png"):
        draw(found, tmp_path / name, busy={"d1": 0.97})
        assert (tmp_path / name).stat().st_size > 5_000
    with pytest.raises(UsageError, match="is drawn as one of"):
        draw(found, tmp_path / "t.txt")

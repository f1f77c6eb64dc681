"""Utilisation over slow links: what is sent, what waits, which codec reaches a target, and the published runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks.goodput import swarm_rows

from shoal.errors import SpecError
from shoal.plan.swarm import CODECS, Link, Swarm, advise, reach, traffic_bytes, utilisation

# 1B parameters, 8 peers, 100 Mbit/s, 100 ms.
CLEAN = Swarm(8, 1.0, 30, 1e9, CODECS["top-k"], Link(100e6, 100e6, achieved=True))
LOSSY = replace(CLEAN, link=Link(100e6, 100e6, loss=1e-3))


def busy(swarm: Swarm = LOSSY, **changes: object) -> float:
    return utilisation(replace(swarm, **changes)).expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("codec", "exchange", "seconds"),
    [("bf16", "ring", 280), ("int8", "ring", 141), ("int4", "ring", 72.9), ("top-k", "all_gather", 15.9)],
)
def test_the_time_of_an_exchange_is_that_of_its_bytes(codec: str, exchange: str, seconds: float) -> None:
    swarm = replace(CLEAN, codec=CODECS[codec], exchange=exchange)
    assert utilisation(swarm).exchange_s == pytest.approx(seconds, rel=0.02)


def test_what_is_sent_is_received() -> None:
    for exchange in ("all_gather", "ring"):
        sent, received = traffic_bytes(replace(CLEAN, codec=CODECS["int8"], exchange=exchange))
        assert sent == received
    payload = CLEAN.payload_bytes
    assert traffic_bytes(replace(CLEAN, exchange="store")) == (payload, 7 * payload)
    found = utilisation(CLEAN)
    assert found.sent_bytes_per_step == pytest.approx(7 * payload / 30)


def test_longer_rounds_better_links_and_smaller_payloads_never_lower_utilisation() -> None:
    link = LOSSY.link
    rising = [
        [busy(sync_every=h) for h in (1, 10, 30, 100, 1000)],
        [busy(link=replace(link, up_bits_per_s=r, down_bits_per_s=r)) for r in (1e7, 1e8, 1e9, 1e10)],
        [busy(link=replace(link, rtt_s=s)) for s in (0.4, 0.2, 0.1, 0.01)],
        [busy(link=replace(link, loss=p)) for p in (0.05, 1e-2, 3e-3, 1e-3, 1e-4, 0.0)],
        [busy(codec=c) for c in sorted(CODECS.values(), key=lambda c: -c.bits)],
        [busy(peers=n) for n in (64, 16, 8, 2, 1)],
        [busy(spread=s) for s in (0.5, 0.1, 0.0)],
        [busy(spread=0.2, quorum=q) for q in (1.0, 0.75, 0.5)],
        [busy(deadline_s=s) for s in (60.0, 10.0, 1.0)],
        [busy(overlap=o) for o in (False, True)],
    ]
    for values in rising:
        assert values == sorted(values)
        assert values[0] < values[-1] <= 1


def test_an_overlapped_exchange_costs_nothing_until_it_is_longer_than_the_round() -> None:
    alone = utilisation(CLEAN)
    assert 15 < alone.exchange_s < alone.compute_s
    assert busy(CLEAN, overlap=True) == 1
    short = utilisation(replace(CLEAN, overlap=True, sync_every=10))
    assert short.exposed_s == pytest.approx(alone.exchange_s - 10)
    assert short.expected == pytest.approx(10 / alone.exchange_s)


def test_a_deadline_leaves_out_the_slow_and_a_quorum_waits_for_fewer() -> None:
    slow = replace(CLEAN, spread=0.2)
    assert utilisation(replace(slow, deadline_s=40.0)).in_time > utilisation(replace(slow, deadline_s=18.0)).in_time > 0
    assert utilisation(replace(slow, quorum=0.75)).in_time == 0.75
    assert utilisation(CLEAN).in_time == 1


def test_a_lossy_long_path_halves_bbr_and_starves_cubic() -> None:
    def moved(loss: float, control: str) -> float:
        return Link(1e8, 1e8, 0.1, loss, control).moved()[1]

    assert moved(1e-3, "bbr") == pytest.approx(0.56)
    assert moved(1e-2, "cubic") == pytest.approx(0.18)
    assert moved(1e-2, "bbr") > moved(1e-2, "cubic") > moved(1e-2, "quic")


def test_which_rounds_and_codec_reach_97_percent() -> None:
    for found in reach(LOSSY):
        assert found.sync_every is not None
        there = replace(LOSSY, codec=found.codec, exchange=found.exchange, sync_every=found.sync_every)
        assert busy(there) >= 0.97 > busy(there, sync_every=found.sync_every - 1)
    assert not any(r.shown for r in reach(LOSSY))
    assert advise(LOSSY).endswith(
        "top-k gaps every 19 steps (all_gather), overlapped with the next round's steps reaches 97%"
    )
    assert "makes 100.0%, which is 97% or more" in advise(replace(LOSSY, overlap=True))
    unlike = replace(LOSSY, spread=0.5)
    assert reach(unlike)[0].sync_every is None
    slow = replace(LOSSY, link=replace(LOSSY.link, up_bits_per_s=1e6))
    assert "even overlapped: use faster links" in advise(slow)


def test_published_runs_lie_within_the_intervals() -> None:
    rows = list(swarm_rows())
    assert [row.name for row in rows if row.held and not row.inside] == []
    assert len([row for row in rows if row.held]) == 4


@pytest.mark.parametrize(
    ("swarm", "says"),
    [
        (replace(CLEAN, exchange="ring"), "cannot be added on their way, as a ring does; use all_gather or store"),
        (replace(CLEAN, link=Link(1e8, 1e8, control="vegas")), "no congestion control 'vegas'; use one of bbr"),
        (replace(CLEAN, peers=0), "at least one peer"),
        (replace(CLEAN, quorum=1.5), "no share of the peers"),
    ],
)
def test_wrong_inputs_are_one_sentence(swarm: Swarm, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        utilisation(swarm)

"""A pipeline with a peer that makes no sense: the others take the steps of one process, and no weight sees a NaN."""

from __future__ import annotations

import asyncio
import math
import struct
from typing import Any

import pytest
import torch

from shoal.errors import NumericsError
from shoal.net.answers import Answers
from shoal.net.api import Message, PeerId, Refused
from shoal.stages.handover import fetch
from shoal.stages.report import read_where
from shoal.stages.routes import misread
from shoal.stages.squeeze import BadPayload, Squeeze
from shoal.values import BadValue
from tests.islands.nonsense import RAW, Bus, End, Made
from tests.stages.toy import Pond, alone

NAN = struct.pack("<d", math.nan)


async def begun(pond: Pond) -> None:
    for stage in pond.layout:
        for peer in stage:
            await pond.start(peer)
    for peer in pond.peers:
        pond.run(peer)


async def ended(pond: Pond, odd: PeerId) -> None:
    """All but one, which is killed then."""
    async with asyncio.timeout(600):
        await asyncio.gather(*(task for peer, task in pond.tasks.items() if peer != odd))


def check(pond: Pond, odd: PeerId, stages: int, micro_batches: int, steps: int) -> None:
    right, _ = alone(stages, micro_batches, steps)
    for stage, peers in enumerate(pond.layout):
        for peer in peers:
            if peer != odd:
                assert pond.toys[peer].w == pytest.approx(right[stage], abs=1e-12)


def test_a_peer_whose_reports_make_no_sense_is_left_out_and_the_lead_leads_on() -> None:
    async def main() -> None:
        pond = Pond([1, 2], micro_batches=4, steps=8, silent_s=2.0)
        await begun(pond)
        odd, made = pond.layout[1][1], Made(3)
        await pond.until(lambda: pond.peers[odd].at >= 2)

        async def answer(peer: PeerId, message: Message) -> Message:
            return Message("here", {}, b"") if made.rng.random() < 0.5 else made.of(Message("here", {"born": "x"}))

        pond.endpoints[odd].on("where", answer)

        async def silent() -> None: ...

        pond.peers[odd].tell_lead = silent  # type: ignore[method-assign]
        await ended(pond, odd)
        check(pond, odd, 2, 4, 8)
        lead = pond.layout[0][0]
        named = [e for p, kind, e in pond.events if kind == "nonsense" and p == lead]
        assert [e["peer"] for e in named] == [odd]
        await pond.close()

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["act", "grad"])
def test_a_peer_that_sends_nan_is_refused_where_it_arrives_and_left_out(kind: str) -> None:
    async def main() -> None:
        pond = Pond([2, 2], micro_batches=4, steps=6, silent_s=2.0)
        await begun(pond)
        odd = pond.layout[0 if kind == "act" else 1][1]
        await pond.until(lambda: pond.peers[odd].at >= 2)
        toy: Any = pond.toys[odd]
        true = {"act": toy.forward, "grad": toy.forward}[kind]
        toy.forward = lambda m, message: (true(m, message), NAN)[1]
        await ended(pond, odd)
        check(pond, odd, 2, 4, 6)
        assert all(math.isfinite(pond.toys[p].w) for p in pond.toys)
        assert any(e.get("peer") == odd for e in pond.seen("left_out"))
        assert len([e for e in pond.seen("nonsense") if e["peer"] == odd]) <= 2  # once for each of its neighbours
        await pond.close()

    asyncio.run(main())


def test_a_newcomer_whose_donor_gives_nonsense_names_it_and_keeps_its_state() -> None:
    made, refused = Made(5), 0

    async def main() -> None:
        nonlocal refused
        bus, events = Bus(), list[dict[str, Any]]()
        me, donor = End(bus, "aa" * 32), End(bus, "bb" * 32)
        for end in (me, donor):
            await end.start()
        offer = Message("state", {"step": 3, "bytes": 8, "digest": "0" * 32})

        async def state(peer: PeerId, message: Message) -> Message:
            return made.of(offer) if made.rng.random() < 0.5 else offer

        async def piece(peer: PeerId, message: Message) -> Message:
            return made.of(Message("piece", {}, b"12345678"))

        donor.on("state", state)
        donor.on("piece", piece)
        clock = [0.0]
        answers = Answers(me, lambda kind, **fields: events.append(fields), clock=lambda: clock[0])
        for _ in range(100):
            clock[0] += 1000.0
            try:
                assert await fetch(answers, donor.id, 1, 0, 64) is None  # "later", by chance
            except Refused:
                refused += 1
        assert not bus.broken
        assert all(e["peer"] == donor.id for e in events)

    asyncio.run(main())
    assert refused > 50


def test_a_report_of_nothing_is_no_report() -> None:
    for n, raw in enumerate(RAW):
        with pytest.raises(BadValue):
            read_where(Message("here", {} if n % 2 else {"plan": 5, "ready": {}}, raw))


def test_who_goes_where_two_cannot_read_each_other() -> None:
    stages = [["a", "b"], ["c", "d"]]
    assert misread(stages, {"c": {"a"}}, keep="b") == {"a"}  # it has a sibling whom nobody blames
    assert misread(stages, {"c": {"a"}, "d": {"a"}}, keep="b") == {"a"}
    assert misread(stages, {"c": {"a", "b"}}, keep="a") == {"c"}  # its own sibling reads both
    assert misread([["a"], ["c", "d"]], {"c": {"a"}}, keep="a") == {"c"}
    assert misread([["a"], ["c", "d"]], {"c": {"a"}, "d": {"a"}}, keep="c") == set()  # nobody could take its place
    assert misread([["a", "b"], ["c"]], {"c": {"a"}}, keep="a") == set()  # the lead itself, and c has no sibling


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8", "int4", "int2"])
def test_no_payload_gives_what_is_no_number(name: str) -> None:
    squeeze = Squeeze(name, 64)
    for wrong in (math.nan, math.inf, -math.inf, 3.4e38):
        values = torch.ones(4, 64)
        values[2, 3] = wrong
        if math.isfinite(wrong) and name != "bf16":
            continue
        with pytest.raises(FloatingPointError):
            squeeze.encode(values)
    good = squeeze.encode(torch.randn(4, 64, generator=torch.Generator().manual_seed(0)))
    made = Made(7)
    for _ in range(300):
        body = bytearray(good)
        for _ in range(made.rng.randint(1, 4)):
            at = made.rng.randrange(len(body) // 2) * 2  # scales and floats are of two bytes or four
            body[at : at + 2] = made.rng.choice([b"\xc0\x7f", b"\x80\x7f", b"\x80\xff", b"\x7f\x7f", b"\xff\xff"])
        try:
            found = squeeze.decode(bytes(body), (4, 64))
        except BadPayload:
            continue
        assert torch.isfinite(found).all()


def test_the_sum_of_a_diverged_run_is_told_plainly_and_is_no_step(tmp_path: Any) -> None:
    async def main() -> None:
        pond = Pond([1, 1], micro_batches=2, steps=3, silent_s=2.0)
        await begun(pond)
        last = pond.layout[1][0]
        pond.toys[last].loss = lambda: math.nan  # type: ignore[method-assign]
        with pytest.raises(NumericsError, match=r"In step \d the gradient or the loss of stage 2 is not finite"):
            await pond.tasks.pop(last)
        await pond.endpoints.pop(last).close()
        await pond.close()

    asyncio.run(main())

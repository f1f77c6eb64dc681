"""Islands in the plan: what they trade is what the trainer sends, and a batch is shared out as it does."""

from __future__ import annotations

import itertools
import socket
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from shoal.decide.plan import planned
from shoal.islands.trade import Offer, Trader
from shoal.plan.asked import Asked
from shoal.plan.island_costs import shards, share, trade
from shoal.plan.search import priced, search
from shoal.spec.island_shards import blocks
from shoal.spec.island_sums import cover
from tests.plan.asked import asked

VECTOR = 4096  # numbers of a rank's gradients


def of_islands(islands: int, batch: int = 64, devices: int = 32, **fleet: Any) -> Asked:
    question = asked("llama3.2-1b", devices, batch)
    told = question.run.fleet.model_copy(update={"islands": islands, **fleet})
    return replace(question, run=question.run.model_copy(update={"fleet": told}))


class Counting:
    """A connection that knows how much was sent on it."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self.sent = sock, 0

    def send(self, data: memoryview) -> int:
        n = self._sock.send(data)
        self.sent += n
        return n

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


def really_sent(islands: int, cut: int, deterministic: bool) -> list[int]:
    """Bytes of gradients that each member sends in one trade; the headers, which say who they are, are left out."""
    socks: list[dict[int, Counting]] = [{} for _ in range(islands)]
    for i, j in itertools.combinations(range(islands), 2):
        with socket.create_server(("127.0.0.1", 0)) as server:
            socks[i][j] = Counting(socket.create_connection(server.getsockname()))
            socks[j][i] = Counting(server.accept()[0])
    headers = [0] * islands

    def member(me: int) -> None:
        nodes = cover(blocks(cut, islands)[me], cut) if deterministic else [(0, 0)]
        offer = Offer(nodes, [torch.ones(VECTOR) for _ in nodes], {})
        trader = Trader(me, socks[me])  # type: ignore[arg-type]
        total = trader.sum(0, offer, torch.empty(VECTOR), cut if deterministic else None, 30).total
        assert float(total[0]) == (sum(len(cover(b, cut)) for b in blocks(cut, islands)) if deterministic else islands)
        headers[me] = (
            len(repr([list(node) for node in nodes]).replace(" ", "")) + len('{"step":0,"nodes":,"says":{}}') + 4
        )

    threads = [threading.Thread(target=member, args=(i,)) for i in range(islands)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [sum(s.sent for s in socks[i].values()) - (islands - 1) * headers[i] for i in range(islands)]


@pytest.mark.parametrize(("islands", "deterministic"), [(2, False), (4, False), (2, True), (3, True)])
def test_islands_send_what_the_trainer_sends(islands: int, deterministic: bool) -> None:
    question = of_islands(islands, batch=48, deterministic=deterministic)
    planned = trade(question.run, 4 * VECTOR, question.machine, question.devices).sent_bytes
    cut = shards(question.run)
    assert cut is not None
    # A vector that does not divide is a number longer for one of them.
    assert max(really_sent(islands, cut, deterministic)) == pytest.approx(planned, abs=8 * 4 * islands)


def test_a_batch_is_cut_as_the_trainer_cuts_it() -> None:
    assert [shards(of_islands(4, batch).run) for batch in (64, 36, 4, 6)] == [16, 12, 4, None]
    assert shards(of_islands(4, 64, shards=8).run) == 8
    assert shards(of_islands(1).run) == 1
    at_once, apart = (share(of_islands(4).run, pipeline) for pipeline in (False, True))
    assert (at_once.windows, at_once.passes, apart.windows, apart.passes) == (16, 1, 4, 4)
    assert share(of_islands(4, deterministic=True).run, False) == apart
    assert share(of_islands(4, 66, shards=11).run, True).passes == 3  # of 11 shards somebody has three


def test_an_island_is_laid_out_like_a_run_of_its_own() -> None:
    """Four islands of 8 with 64 windows compute what 8 devices do with 16; then they trade, and wait for each other."""
    question = of_islands(4)
    best = search(question, 1)[0]
    alone = asked("llama3.2-1b", 8, 16, dp_replicate=1)
    same = priced(alone, best.layout, best.recompute)
    assert best.layout.sizes.world == 8
    assert best.memory == same.memory
    for name in set(same.parts) - {"waiting"}:
        assert best.parts[name] == pytest.approx(same.parts[name]), name
    assert best.parts["islands"] > 0
    assert best.seconds > same.seconds


def test_shards_one_by_one_cost_more_and_a_slow_network_is_seen() -> None:
    best, apart = (search(of_islands(4, deterministic=told), 1)[0] for told in (False, True))
    assert apart.seconds > best.seconds
    question = of_islands(4)
    slow = replace(question, machine=replace(question.machine, nic=0.1e9))
    assert search(slow, 1)[0].parts["islands"] > 5 * best.parts["islands"]
    near = replace(slow, machine=replace(slow.machine, node=32))  # all of them in one node
    assert search(near, 1)[0].parts["islands"] == pytest.approx(best.parts["islands"])


def test_an_open_mesh_of_islands_is_laid_out_by_the_planner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.plan.expect.this_device", lambda: "NVIDIA H100 80GB HBM3")
    question = of_islands(4)
    best = planned(question.run, question.shape, 8, [])
    assert best is not None
    assert best.layout == search(question, 1)[0].layout
    assert "the fastest of all layouts on 8 H100 SXM of each island as predicted" in best.why


def test_devices_or_batches_that_islands_cannot_share_have_no_layout() -> None:
    assert search(of_islands(3)) == []
    assert search(of_islands(4, devices=30)) == []
    assert search(of_islands(4, batch=30)) == []

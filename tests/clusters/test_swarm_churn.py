"""Eight peers over slow links, real processes: two are killed, two come, the network breaks for a minute, in one run.

The model is a toy; nodes, links, parts and the network between them are real (docs/decisions/039).
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
from benchmarks.fleet.swarm_on_wan import Swarm
from benchmarks.fleet.swarm_peer import SWARM
from tests.namespaces import need_namespaces

from shoal.emulate import Site, Wan
from shoal.swarm.chain import Chain
from shoal.swarm.ranges import count, union
from shoal.swarm.round_record import Record, verified

pytestmark = [pytest.mark.cluster, pytest.mark.alone]  # it is about who keeps time

ROUND_S = 10.0
STALL_S = 5.0
CUT_S = 60.0


def history(swarm: Swarm, site: str) -> Chain:
    return Chain(SWARM, Record("start", 0, (), ()), verified, swarm.folder / site / "chain.jsonl")


def stalls(swarm: Swarm, site: str, since: float) -> list[float]:
    """Seconds that its trainer had nothing to do, if more than half a second."""
    file = swarm.folder / site / "stalls.jsonl"
    found = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [one["seconds"] for one in found if one["t"] > since]


def test_two_die_two_come_and_a_cut_of_a_minute_in_one_run(tmp_path: Path) -> None:
    need_namespaces()
    sites = [f"p{i}" for i in range(10)]
    run = {
        "name": "churn",
        "data": {"train": "none"},
        "train": {"steps": 100_000, "batch": 80},
        "swarm": {"peers": 8, "round": f"{ROUND_S:g} s", "silent": "4 s", "snapshot_every": 4},
    }
    trainer = [sys.executable, "-m", "tests.swarm.toy_trainer", "65536", "20"]
    with Wan([Site(s, "open", up_mbit=100, down_mbit=100) for s in sites], 100.0, 0.001) as wan:
        swarm = Swarm(wan, tmp_path, sites, run, trainer)
        try:
            for site in sites[:8]:
                swarm.start(site)
            swarm.until(lambda: swarm.agree() and swarm.round("p0") >= 3, 120, "eight peers train")
            began = time.time()

            first = swarm.events("p2", "record")[-1]["by"]
            leader = next(site for site, key in swarm.keys.items() if key.startswith(first))
            dead = [leader, next(s for s in sites[:8] if s != leader)]
            for site in dead:
                swarm.kill(site)
            swarm.until(swarm.agree, 60, "two of eight are dead")
            for site in sites[8:]:
                swarm.start(site)
            swarm.until(swarm.agree, 90, "two have come")

            alive = sorted(swarm.processes)
            small, large = alive[:3], alive[3:]
            at = swarm.round(large[0])
            wan.cut(small, large)
            cut = time.time()
            time.sleep(CUT_S)
            rounds = {site: swarm.round(site) - at for site in alive}
            wan.heal()
            healed = time.monotonic()
            swarm.until(swarm.agree, 60, "the halves merge")
            merged_s = time.monotonic() - healed
            at = swarm.round(alive[0])
            swarm.until(lambda: swarm.agree() and swarm.round(alive[0]) >= at + 2, 60, "all go on together")
        finally:
            swarm.close()

    chain = history(swarm, alive[0])
    past = list(chain.past(chain.head.hash))
    print(f"\nrounds in the cut: {rounds}; one history {merged_s:.1f} s after it; {len(past)} records")
    assert all(n >= CUT_S / ROUND_S / 2 for n in rounds.values()), f"a half did not train on: {rounds}"
    assert all(n <= CUT_S / ROUND_S + 3 for n in rounds.values()), f"a half did not keep time: {rounds}"
    assert {"branch", "merge"} <= {record.kind for record in past}
    # All hold the same history and weights (`agree`), and each sample was used once or is still to be used.
    parts = [part.used for record in past for part in record.took]
    ledger = chain.head.ledger
    assert sum(map(count, parts)) == count(union(*parts)) == ledger.done
    assert count(union(*parts, ledger.free, *ledger.held.values(), *ledger.away.values())) == ledger.cursor
    # No round was lost: after those who were cut off or died every survivor's part is in each record of its half.
    waited = {site: max(stalls(swarm, site, began), default=0.0) for site in alive if site not in sites[8:]}
    print(f"longest time without work: {max(waited.values()):.1f} s ({waited}); cut at {cut - began:.0f} s")
    assert max(waited.values()) <= STALL_S

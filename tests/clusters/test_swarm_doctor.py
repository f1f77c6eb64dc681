"""From each kind of network: what the doctor says, and that one gets in all the same, to an inviter behind a NAT."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.namespaces import need_namespaces
from tests.patience import limit
from tests.swarm.test_enter import run_file

from shoal.emulate import Site, Wan

pytestmark = [pytest.mark.cluster, pytest.mark.uses("wan")]

ROOT = Path(__file__).parents[2]
PORT = 3340
SHOAL = [sys.executable, "-c", "from shoal.cli.main import main; raise SystemExit(main())", "swarm"]


@pytest.fixture(autouse=True)
def _namespaces() -> None:
    need_namespaces()


def start(wan: Wan, site: str, *typed: str) -> subprocess.Popen[str]:
    process: subprocess.Popen[str] = wan.run(site, [*SHOAL, *typed], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    return process


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


@contextmanager
def swarm(tmp_path: Path) -> Iterator[tuple[Wan, str]]:
    """Two relays, an organiser's peer behind a NAT that computes nothing, and its invitation."""
    file = run_file(tmp_path / "home")
    kinds = {"home": "cone", "open": "open", "cone": "cone", "symmetric": "symmetric", "firewall": "firewall"}
    sites = [*(Site(name, nat=nat) for name, nat in kinds.items()), Site("relay0"), Site("relay1")]  # type: ignore[arg-type]  # names of NATs
    with Wan(sites, rtt_ms=40) as wan:
        relays = []
        for name in ("relay0", "relay1"):
            assert first_line(start(wan, name, "relay", "--port", str(PORT))).startswith("Relay at")
            relays += ["--relay", f"http://{wan.address(name)}:{PORT}"]
        made = start(
            wan, "home", "create", str(file), "--no-train", "--json", "--workspace", str(tmp_path / "first"), *relays
        )
        yield wan, str(json.loads(first_line(made))["invitation"])


def test_the_doctor_knows_each_network_and_everybody_gets_in(tmp_path: Path) -> None:
    with swarm(tmp_path) as (wan, line):
        looks = {
            site: start(wan, site, "doctor", line, "--json", "--workspace", str(tmp_path / site))
            for site in ("open", "cone", "symmetric", "firewall")
        }
        told: dict[str, dict[str, Any]] = {}
        for site, process in looks.items():
            out, _ = process.communicate(timeout=limit(120))
            told[site] = {one["about"]: one for one in json.loads(out)}
            assert process.returncode == 0, told[site]
        for site, found in told.items():
            print(site, *(f"{about}: {one['text']}" for about, one in found.items()), sep="\n  ")
        assert "none: this machine has a public address" in told["open"]["NAT"]["text"]
        assert "keeps its ports" in told["cone"]["NAT"]["text"]
        assert "symmetric" in told["symmetric"]["NAT"]["text"]
        assert "drops UDP" in told["firewall"]["UDP"]["text"]
        assert all("packets come through" in told[site]["UDP"]["text"] for site in ("open", "cone", "symmetric"))
        assert "a relay" in told["symmetric"]["peer"]["text"]
        joins = {
            site: start(wan, site, "join", line, "--no-start", "--workspace", str(tmp_path / site))
            for site in ("cone", "symmetric", "firewall")
        }
        for site, process in joins.items():
            out, _ = process.communicate(timeout=limit(120))
            assert process.returncode == 0, (site, out)
            got = tmp_path / site / "runs" / "fishes" / "inputs" / "0-train" / "shard-0"
            assert got.read_bytes() == (tmp_path / "home" / "data" / "train" / "shard-0").read_bytes()

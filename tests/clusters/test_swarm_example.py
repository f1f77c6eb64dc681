"""`examples/swarm` does what it says: four peers behind NATs, a relay, one model; and nothing is left of it."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.namespaces import need_namespaces
from tests.patience import Stopwatch, limit

from shoal.emulate import spaces

pytestmark = [pytest.mark.cluster, pytest.mark.alone, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
PLACE = ROOT / "demo-workspace" / "swarm"
PEERS = ("anna", "ben", "office", "lab")
ROUNDS = 3


def status(peer: str) -> dict[str, Any]:
    file = PLACE / peer / "runs" / "swarm" / "swarm" / "status.json"
    try:
        return dict(json.loads(file.read_text()))
    except (OSError, ValueError):
        return {}


def logs() -> str:
    return "\n".join(f"== {log.name}\n{log.read_text()[-1500:]}" for log in sorted(PLACE.glob("*.log")))


def test_four_peers_behind_nats_train_one_model() -> None:
    need_namespaces()
    shutil.rmtree(PLACE, ignore_errors=True)
    example = subprocess.Popen([sys.executable, "examples/swarm/start.py"], cwd=ROOT, stdout=subprocess.PIPE)
    try:
        watch = Stopwatch()
        while not all(status(peer).get("round", 0) >= ROUNDS for peer in PEERS):
            assert example.poll() is None, logs()
            assert watch.quiet_s() < 300, logs()
            time.sleep(0.5)
        seen = status("anna")
        ways = {member["name"]: member["way"] for member in seen["members"]}
        assert set(ways) == set(PEERS)
        assert ways["ben"] in ("tcp", "direct")
        assert ways["office"] == ways["lab"] == "relay"
        assert seen["done"] > 0
    finally:
        example.send_signal(signal.SIGINT)
        example.communicate(timeout=limit(30))
    assert example.returncode == 0
    assert not spaces.beginning(f"shoal-{example.pid}-")

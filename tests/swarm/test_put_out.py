"""Real nodes, each a process: one of them lies, the others name it with the proof, put it out and train on."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.main import main
from shoal.journal.journal import records
from shoal.journal.rundir import RunDir
from shoal.net.identity import Identity
from shoal.swarm import enter
from shoal.swarm.config import NodeConfig, folder_of
from shoal.swarm.lies import Lie
from tests.swarm.test_enter import run_file

TOY = shlex.join([sys.executable, "-m", "tests.swarm.toy_trainer", "4096", "50"])
PEER = ["--tcp-only", "--listen", "127.0.0.1", "--trainer", TOY]
QUICK = ["train.steps=100000", "train.batch=8", "swarm.peers=3", "swarm.round=1 s", "swarm.deadline=2 s"]
STUCK_S = 300.0  # on a busy machine; nothing here is about time


class Real:
    """A peer on this machine, its node a process."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.config = NodeConfig(folder_of(RunDir.of("fishes", folder)))

    def start(self, *lie: str) -> None:
        said = open(self.folder / "said", "w")  # noqa: SIM115, as long as the process lives
        words = (
            [*lie, str(self.folder), "fishes"] if lie else ["swarm", "join", "fishes", "--workspace", str(self.folder)]
        )
        module = "tests.swarm.lying_node" if lie else "shoal"
        self.process = subprocess.Popen([sys.executable, "-m", module, *words], stdout=said, stderr=said)

    @property
    def me(self) -> str:
        return Identity.load(self.config.identity_file).id

    def said(self) -> str:
        return (self.folder / "said").read_text()

    def events(self, kind: str) -> list[dict[str, Any]]:
        file = self.config.folder / "events.jsonl"
        return [e for e in records(file) if e["kind"] == kind] if file.exists() else []

    @property
    def round(self) -> int:
        return max((e["round"] for e in self.events("record")), default=0)


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[list[Real]]:
    found = [Real(tmp_path / name, name) for name in ("oslo", "bergen", "molde")]
    yield found
    for peer in found:
        if hasattr(peer, "process") and peer.process.poll() is None:
            peer.process.kill()
            peer.process.wait()


def until(true: Callable[[], bool], peers: list[Real]) -> None:
    end = time.monotonic() + STUCK_S
    while not true():
        assert time.monotonic() < end, {p.name: p.said()[-2000:] for p in peers}
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        ("proposals", "has proposed two records in term 0 after one head"),
        pytest.param("range", "has signed a pulse with a whole number of 401 digits", marks=pytest.mark.slow),
    ],
)
def test_a_member_that_lies_is_named_with_the_proof_and_put_out_and_the_others_train_on(
    lie: str,
    words: str,
    peers: list[Real],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(enter, "REACH_S", STUCK_S)
    oslo, bergen, liar = peers
    file = str(run_file(tmp_path / "home"))
    assert (
        main(
            [
                "swarm",
                "create",
                file,
                *QUICK,
                "--no-start",
                "--json",
                "--name",
                "oslo",
                "--workspace",
                str(oslo.folder),
                *PEER,
            ]
        )
        == 0
    )
    line = json.loads(capsys.readouterr().out)["invitation"]
    oslo.start()
    data = ["--data", str(tmp_path / "home" / "data" / "train"), "--data", str(tmp_path / "home" / "data" / "eval")]
    for peer in (bergen, liar):
        if peer is liar:  # who has the smallest key leads a new swarm
            while Identity.at(liar.config.identity_file).id > min(oslo.me, bergen.me):
                liar.config.identity_file.unlink()
        joined = ["swarm", "join", line, "--no-start", "--name", peer.name, "--workspace", str(peer.folder), *data]
        assert main([*joined, *PEER]) == 0
    bergen.start()
    liar.start(lie)
    honest = [oslo, bergen]
    until(lambda: liar.process.poll() is not None, peers)
    assert liar.process.returncode == 78
    assert f"shoal: the others have put this peer out: it {words}" in liar.said()
    [close] = [r for r in records(liar.config.run_dir.journal_file) if r["kind"] == "close"]
    assert (close["exit_code"], close["status"]) == (78, "failed")
    until(lambda: all(any(liar.me[:8] in e["left"] for e in p.events("record")) for p in honest), peers)
    at = max(p.round for p in honest)
    until(lambda: all(p.round >= at + 2 for p in honest), peers)
    for peer in honest:
        [named] = peer.events("put-out")
        assert (named["peer"], named["proof"], named["me"]) == (liar.me, lie, False)
        assert f"molde ({liar.me[:8]}) is put out of the swarm: it {words}" in named["text"]
        assert named["text"] in peer.said()
        assert named["text"] in [r["text"] for r in records(peer.config.run_dir.journal_file) if r["kind"] == "warning"]
        [gone] = [e for e in peer.events("record") if e["left"]]
        assert (gone["left"], gone["members"]) == ({liar.me[:8]: "put out"}, 2)
        roster = json.loads(peer.config.roster_file.read_bytes())
        [proof] = roster["lies"]
        assert Lie.of(proof, roster["swarm"]).by == liar.me  # anybody can check it
        assert main(["swarm", "status", "fishes", "--workspace", str(peer.folder)]) == 0
        told = capsys.readouterr().out
        assert "2 peers" in told
    found = [e for p in honest for e in p.events("liar")]
    assert {(e["peer"], e["proof"]) for e in found} == {(liar.me, lie)}  # whoever has found it; the other may be told

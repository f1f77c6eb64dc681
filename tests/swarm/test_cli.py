"""The words of `shoal swarm`, as typed; nodes are not started here."""

from __future__ import annotations

import asyncio
import io
import json
import sys
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shoal.cli.main import main
from shoal.cli.swarm.shared import read_line
from shoal.errors import UsageError
from shoal.journal.journal import records
from shoal.net.identity import Identity
from shoal.spec import load
from shoal.swarm import start
from shoal.swarm.charter import Charter
from shoal.swarm.config import NodeConfig
from shoal.swarm.control import alone, obey
from shoal.swarm.invite import Invitation
from shoal.swarm.roster import Roster
from shoal.swarm.session_journal import session
from shoal.swarm.start import Log
from tests.swarm.test_enter import First, run_file

LOCAL = ["--tcp-only", "--listen", "127.0.0.1"]
STATUS = {
    "time": 0.0,
    "self": "aa" * 32,
    "name": "oslo",
    "round": 12,
    "head": "3f" * 32,
    "branch": None,
    "split": {"round": 11, "sides": [["aa" * 32, "bb" * 32], ["cc" * 32]]},
    "members": [
        {"peer": "aa" * 32, "name": "oslo", "way": None, "share": 0.5, "tokens_per_s": 12345.0, "busy": 0.97},
        {
            "peer": "bb" * 32, "name": "<$bergen>", "way": "relay", "rtt_s": 0.1, "up": 1.25e6, "down": 2e6,
            "loss": 0.001, "heard_s": 0.4, "share": 0.5, "tokens_per_s": 9000, "busy": None, "head": "11" * 32,
        },
        {"peer": "cc" * 32, "late": True},
        {"peer": "dd" * 32, "member": False, "step_loss": 3.21},
    ],
    "links": {
        "aa" * 32: [["bb" * 32, "relay", 0.1, 1.25e6, 2e6], ["cc" * 32, "tcp", 0.02, 9e6, 9e6]],
        "bb" * 32: [["aa" * 32, "relay", 0.1, 2e6, 1.25e6]],
        "cc" * 32: [],
    },
    "sizes": {"aa" * 32: 1 << 20, "bb" * 32: 1 << 20},
    "topology": "3 peers in 2 regions",
    "exchange_s": 9.8,
    "round_s": 61.0,
    "utilisation": 0.961,
    "predicted": 0.97,
    "done": 50,
    "total": 200,
    "events": [
        {"time": 1.0, "kind": "link_up", "peer": "bb" * 32, "way": "relay"},
        {"time": 2.0, "kind": "record", "round": 12, "members": 3, "took": ["a", "b"], "exchange_s": 2.0,
         "joined": ["bbbbbbbb"], "left": {"cccccccc": "silent"}},
    ],
}  # fmt: skip


def create(tmp_path: Path, capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, str]:
    file = str(run_file(tmp_path / "home"))
    assert main(["swarm", "create", file, "--no-start", "--json", "--workspace", str(tmp_path), *LOCAL, *more]) == 0
    made: dict[str, str] = json.loads(capsys.readouterr().out)
    return made


@contextmanager
def served(first: First) -> Iterator[Invitation]:
    """A first peer that lives in a thread of its own."""
    ready, stop, found = threading.Event(), threading.Event(), []

    async def live() -> None:
        async with first.running() as invitation:
            found.append(invitation)
            ready.set()
            while not stop.is_set():
                await asyncio.sleep(0.02)

    thread = threading.Thread(target=lambda: asyncio.run(live()))
    thread.start()
    try:
        assert ready.wait(10)
        yield found[0]
    finally:
        stop.set()
        thread.join()


def test_create_makes_a_swarm_whose_invitation_others_can_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = create(tmp_path, capsys, "--name", "oslo", "--expires", "2d")
    config = NodeConfig.load(Path(made["folder"]))
    invitation = Invitation.read(made["invitation"])
    [address] = invitation.peers.values()
    assert address.tcp == (f"127.0.0.1:{config.port}",)
    assert invitation.swarm == made["swarm"]
    assert abs(invitation.ticket.expires - time.time() - 2 * 86400) < 100
    secret = [config.organiser_file, config.identity_file, config.roster_file, *config.invitations.iterdir()]
    assert all(file.stat().st_mode & 0o077 == 0 for file in secret)
    assert load(config.run).run.train.steps == 9
    for verb in (["resume", "fishes"], ["train", str(tmp_path / "home" / "run.yaml")]):
        assert main([*verb, "--workspace", str(tmp_path)]) == 2
        assert "is a peer of a swarm" in capsys.readouterr().err
    again = ["swarm", "create", str(tmp_path / "home" / "run.yaml"), "--workspace", str(tmp_path)]
    assert main(again) == 2
    assert "is a swarm already" in capsys.readouterr().err


def test_tokens_become_steps_before_the_swarm_is_made_so_that_all_peers_have_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = NodeConfig.load(Path(create(tmp_path, capsys, "train.tokens=1M")["folder"]))
    ours = load(config.run).run.train
    assert (ours.steps, ours.tokens) == (62, None)
    assert Charter.load(config.charter_file).run["train"]["steps"] == 62


def test_invitations_are_printed_made_and_revoked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = create(tmp_path, capsys)
    where = ["--workspace", str(tmp_path)]

    def invite(*more: str) -> str:
        assert main(["swarm", "invite", "fishes", "--json", *where, *more]) == 0
        return str(json.loads(capsys.readouterr().out)["invite"])

    assert invite() == made["invite"]
    other = invite("--new", "--expires", "1h")
    assert other != made["invite"]
    assert main(["swarm", "revoke", "fishes", other[:10], *where]) == 0
    assert "nobody was there to tell" in capsys.readouterr().out
    assert invite() == made["invite"]
    assert main(["swarm", "revoke", "fishes", made["invitation"], *where]) == 0
    assert main(["swarm", "invite", "fishes", *where]) == 2
    assert "--new" in capsys.readouterr().err
    # A node that runs is told instead.
    config = NodeConfig.load(Path(made["folder"]))
    fresh = invite("--new")
    with alone(config):
        assert main(["swarm", "revoke", "fishes", fresh[:10], *where]) == 0
        roster = Roster.load(config.roster_file, Identity.load(config.identity_file))
        obey(config, roster)
        assert fresh in roster.revoked()


def test_join_gets_everything_and_takes_only_what_is_a_peers_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = First(tmp_path, run_file(tmp_path / "home"))
    with served(first) as invitation:
        join = ["swarm", "join", invitation.line(), "--no-start", "--workspace", str(tmp_path / "new"), *LOCAL]
        assert main([*join, "train.steps=100"]) == 2
        assert main([*join, "resources.processes=2", "--name", "bergen"]) == 0
    out = capsys.readouterr().out
    assert "fetches inputs/0-train" in out
    run = load(tmp_path / "new" / "runs" / "fishes" / "run.yaml").run
    assert run.resources.processes == 2
    assert Path(run.data.train[0].path, "shard-0").exists()
    assert main(["swarm", "status", "fishes", "--workspace", str(tmp_path / "new")]) == 75
    assert "starts it" in capsys.readouterr().err
    assert main(["swarm", "leave", "fishes", "--workspace", str(tmp_path / "new")]) == 0


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        (["join", "shoal1nonsense"], "damaged"),
        (["join", "nowhere"], "there is no swarm 'nowhere'"),
        (["doctor", "https://example.org"], "no invitation"),
        (["status", "nowhere"], "there is no swarm"),
        (["invite", "nowhere", "train.steps=3"], "takes no values"),
        (["create", "run.yaml", "--expires", "soon"], "--expires soon"),
        (["join", "nowhere", "--listen", "host:1"], "no swarm"),
        (["jion", "x"], "there is no `shoal swarm jion`; did you mean join?"),
    ],
)
def test_wrong_use_is_one_sentence(
    typed: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["swarm", *typed]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1


def test_status_as_people_programs_and_browsers_read_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = create(tmp_path, capsys)
    config = NodeConfig.load(Path(made["folder"]))
    config.status_file.write_text(json.dumps({**STATUS, "time": time.time()}))
    typed = ["swarm", "status", "fishes", "--workspace", str(tmp_path)]
    with alone(config):
        assert main([*typed, "--picture", str(tmp_path / "swarm.svg")]) == 0
    out = capsys.readouterr().out
    assert "busy 96.1% (97.0% predicted)" in out
    assert "10 Mbit/s" in out
    assert "another head" in out
    assert "not in yet" in out
    assert "25.0% of 200 samples" in out
    assert "link up: peer <$bergen>, way relay" in out
    assert "round 12, parts of 2 of 3, exchange 2.0 s, <$bergen> joined, cccccccc left (silent)" in out
    assert "WEIGHTS DIFFER after round 11: oslo, <$bergen> against cccccccc\n" in out
    assert "not running" not in out
    drawn = ET.parse(tmp_path / "swarm.svg")  # whatever peers call themselves
    assert drawn.getroot().tag.endswith("svg")
    assert main([*typed, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["running"] is False
    assert told["round"] == 12
    assert main([*typed, "--picture", "x.gif"]) == 2


def test_what_a_person_must_know_is_on_the_console_and_in_both_journals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = NodeConfig(tmp_path / "runs" / "fishes" / "swarm")
    config.folder.mkdir(parents=True)
    with session(config.run_dir.journal_file) as life:
        log = Log(config, life.warn)
        log(
            "split",
            round=7,
            sides=[["aaaaaaaa"], ["bbbbbbbb"]],
            text="weights differ after round 7: oslo against molde",
        )
    assert "shoal: weights differ after round 7: oslo against molde" in capsys.readouterr().err
    warnings = [r["text"] for r in records(config.run_dir.journal_file) if r["kind"] == "warning"]
    assert warnings == ["weights differ after round 7: oslo against molde"]
    [split] = records(config.folder / "events.jsonl")
    assert (split["kind"], split["round"]) == ("split", 7)
    assert log.recent[0]["text"] == warnings[0]


@pytest.mark.parametrize("track", ["track.mlflow=false", "track.tensorboard=true"])
def test_a_peers_journal_is_mirrored_as_its_own_run_file_says(
    track: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = create(tmp_path, capsys, "track.mlflow=false", track)
    config = NodeConfig.load(Path(made["folder"]))
    out = tmp_path / "mirrored"
    code = (
        "import sys, time\nwhile '\"close\"' not in open(sys.argv[1]).read(): time.sleep(0.02)\nopen(sys.argv[2], 'w')"
    )
    command = [sys.executable, "-c", code, str(config.run_dir.journal_file), str(out)]
    monkeypatch.setattr(start.mirroring, "default_command", lambda run_dir: command)
    monkeypatch.setattr(start, "MIRROR_WAIT_S", 60.0)

    async def trained(*_: object) -> int:
        assert not out.exists()  # it follows, and nobody waits for it before the journal is closed
        return 0

    monkeypatch.setattr(start, "_run", trained)
    assert start.run_node(config) == 0
    assert out.exists() == (track == "track.tensorboard=true")
    out.unlink(missing_ok=True)
    monkeypatch.setattr(sys, "argv", ["shoal", "swarm", "join", made["invitation"]])
    assert start.run_node(config) == 0
    assert made["invitation"][:40] not in config.run_dir.journal_file.read_text()
    assert "shoal1***" in config.run_dir.journal_file.read_text()


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (
            "checkpoint.remote=s3://bucket/x",
            "checkpoint.remote has no effect in a peer of a swarm: a peer copies nothing",
        ),
        ("guard.hang=off", "guard.hang has no effect"),
        ("data.skip=[1]", "data.skip has no effect"),
        ("swarm.stages.rank=8", "swarm.stages.rank has no effect"),
        ("fleet.islands=2", "one island"),
    ],
)
def test_create_refuses_what_no_peer_would_obey(
    override: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(run_file(tmp_path / "home"))
    assert main(["swarm", "create", file, "--no-start", "--workspace", str(tmp_path), *LOCAL, override]) == 2
    assert says in capsys.readouterr().err


def test_an_invitation_comes_from_a_file_the_input_or_the_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = create(tmp_path, capsys)
    file = tmp_path / "line"
    file.write_text(f"\n{made['invitation']}\n")
    file.chmod(0o644)
    assert read_line(f"@{file}").id == made["invite"]
    assert f"chmod 600 {file}" in capsys.readouterr().err
    file.chmod(0o600)
    assert read_line(f"@{file}").id == made["invite"]
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys, "stdin", io.StringIO(made["invitation"]))
    assert read_line("-").id == made["invite"]
    assert read_line(made["invitation"]).id == made["invite"]
    with pytest.raises(UsageError, match="cannot be read"):
        read_line(f"@{tmp_path / 'nothing'}")

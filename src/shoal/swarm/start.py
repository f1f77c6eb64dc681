"""Starts the node of a peer: its links, its roster, its history and its trainer, until the run is done or it leaves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from shoal.decide.checks import trainable
from shoal.decide.load import load
from shoal.errors import SetupError, ShoalError, Stopped
from shoal.guard import mirroring
from shoal.journal.journal import Journal
from shoal.journal.suggested import command
from shoal.net.answers import Answers
from shoal.net.identity import Identity
from shoal.spec.run import Run
from shoal.swarm.blobs import Blobs
from shoal.swarm.charter import Charter
from shoal.swarm.config import NodeConfig
from shoal.swarm.control import alone, forget_commands, obey
from shoal.swarm.enter import endpoint_of
from shoal.swarm.gossip import Gossip
from shoal.swarm.node import Node
from shoal.swarm.roster import Roster
from shoal.swarm.session_journal import Session, session
from shoal.swarm.view import status

EVERY_S = 1.0
MIRROR_WAIT_S = 5.0  # a peer was told to leave, or its swarm is done: somebody waits
QUIET = ("blob", "part")  # kinds of events that are too many for a person


class Log:
    """What happens: to the journal of the swarm, the last of it to the status, the most important to the console. What
    has a text is for a person: it is also a warning in the journal of the run."""

    def __init__(self, config: NodeConfig, warn: Callable[[str], None]) -> None:
        config.folder.mkdir(parents=True, exist_ok=True)
        self._journal = Journal(config.folder / "events.jsonl")
        self.recent: deque[dict[str, Any]] = deque(maxlen=20)
        self.name_of: Callable[[str], str] = lambda peer: peer[:8]
        self._warn = warn

    def __call__(self, kind: str, **fields: Any) -> None:
        self._journal.note(kind, **fields)
        if kind in QUIET:
            return
        self.recent.append({"time": time.time(), "kind": kind, **fields})
        if kind == "record":
            self._say_round(fields)
        elif kind == "leaving":
            print("leaving: what is trained is handed in first; once more leaves at once", flush=True)
        elif "text" in fields:
            self._warn(fields["text"])
            print(f"shoal: {fields['text']}", file=sys.stderr, flush=True)
        elif kind in ("trainer-gone", "trainer-failed", "base-failed", "refused"):
            print(f"shoal: {kind.replace('-', ' ')}: {_told(fields)}", file=sys.stderr, flush=True)

    def _say_round(self, f: dict[str, Any]) -> None:
        news = [f"{self.name_of(peer)} joined" for peer in f["joined"]]
        news += [f"{self.name_of(peer)} left ({why})" for peer, why in f["left"].items()]
        kind = "" if f["record"] == "round" else f" ({f['record']})"
        parts = f"parts of {len(f['took'])}, {f['members']} peer{'s' * (f['members'] != 1)}"
        words = ", ".join([parts, f"{f['done']} samples done", *news])
        print(f"round {f['round']}{kind}: {words}", flush=True)


def run_node(config: NodeConfig) -> int:
    """The exit code; raises what has ended it."""
    with alone(config):
        forget_commands(config)
        run = load(config.run).run
        trainable(run, "swarm")
        with ExitStack() as afterwards, session(config.run_dir.journal_file) as life:
            if config.train and mirroring.wanted(run.track):
                mirror = mirroring.Mirror(config.run_dir, mirroring.default_command(config.run_dir))
                afterwards.callback(_wait_for, mirror, config)
            return asyncio.run(_run(config, run, life))


def _wait_for(mirror: mirroring.Mirror, config: NodeConfig) -> None:
    """The journal is closed: what is not in the trackers yet gets there a little later, or by hand."""
    with contextlib.suppress(KeyboardInterrupt):
        if mirror.caught_up(MIRROR_WAIT_S, time.sleep, hurry=lambda: False):
            return
    print(f"tracking is behind; {command('track sync', config.run_dir)} uploads the rest.", file=sys.stderr, flush=True)


async def _run(config: NodeConfig, run: Run, life: Session) -> int:
    event = Log(config, life.warn)
    identity = Identity.load(config.identity_file)
    roster = Roster.load(config.roster_file, identity, event)
    event.name_of = lambda peer: next((roster.name(p) for p in roster.summary() if p.startswith(peer)), peer)
    charter = Charter.load(config.charter_file)
    endpoint = endpoint_of(config, roster, event)
    await endpoint.start()
    try:
        answers = Answers(endpoint, event, roster.name)
        gossip = Gossip(roster, endpoint, event, charter=charter.to_bytes(), answers=answers)
        node = Node(
            config.folder,
            charter.swarm,
            identity,
            endpoint,
            run,
            config.trainer_command if config.train else None,
            admitted=roster.__contains__,
            name_of=roster.name,
            event=event,
            accuse=roster.accuse,
            blobs=Blobs(config.blobs, endpoint, event, answers),
            answers=answers,
            pinned=frozenset(charter.blobs()),
            starts=life.attempt,
        )
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, node.leave)
        gossip.watch(lambda changed: node.put_out(changed.gone))
        node.tasks.keep("the gossip", gossip.run)
        node.tasks.keep("the ear for commands", lambda: hear_commands(config, roster, node.leave, node.fail))
        node.tasks.keep("the status", lambda: _show_for_ever(config, node, event))
        try:
            return await node.run()
        except Stopped:
            await gossip.leave()
            raise
        finally:
            await node.tasks.close()
            _show(config, node, event)
    finally:
        await endpoint.close()


async def hear_commands(
    config: NodeConfig, roster: Roster, leave: Callable[[], None], fail: Callable[[ShoalError], None]
) -> None:
    """Once a second: what commands say. Apart from the status: nothing that others say may keep a node from obeying."""
    while True:
        if obey(config, roster):
            leave()
        if (mine := roster.lies().get(roster.me.id)) is not None:
            fail(SetupError(f"the others have put this peer out: it {mine.words()}."))
        elif roster.expelled:
            fail(SetupError("the organiser has revoked this peer: nobody in the swarm talks to it any more."))
        await asyncio.sleep(EVERY_S)


async def _show_for_ever(config: NodeConfig, node: Node, event: Log) -> None:
    """Once a second, for those who look."""
    while True:
        _show(config, node, event)
        await asyncio.sleep(EVERY_S)


def _show(config: NodeConfig, node: Node, event: Log) -> None:
    write_status(config, status(node, list(event.recent)))


def write_status(config: NodeConfig, said: dict[str, Any]) -> None:
    new = config.status_file.with_suffix(".new")
    with contextlib.suppress(OSError):  # a full disk is no reason to stop
        new.write_text(json.dumps(said))
        new.replace(config.status_file)


def _told(fields: dict[str, Any]) -> str:
    return ", ".join(f"{k} {v[:8] if k == 'peer' else v}" for k, v in fields.items())

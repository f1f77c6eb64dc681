"""No work of a node ends unheard: it is started again, or ends the node with a sentence."""

from __future__ import annotations

import ast
import asyncio
from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal.errors import TransientError
from shoal.net import tasks as tasks_module
from shoal.net.tasks import Tasks
from shoal.swarm import start
from tests.swarm.test_hostile import Shore

SOURCE = Path(shoal.__file__).parent
# Where tasks are made by hand, and who hears of their failures there.
BY_HAND = {
    ("stages/training.py", "unless_told"): "waited for, and what it raises ends the peer",
    ("net/tasks.py", "keep"): "this is the one place",
    ("net/tasks.py", "spawn"): "this is the one place",
    ("net/carrier.py", "_run"): "a failure closes the link, with its reason",
    ("net/seek.py", "seek"): "it begins anew after any failure, which is journaled",
    ("net/seek.py", "_dial_tcp"): "waited for at once",
    ("net/relays.py", "_watch"): "ends with the watch, which hears its own failures",
    ("net/rendezvous.py", "start"): "asks on after any failure of a caller",
    ("net/rendezvous.py", "_accept"): "one answer to one caller",
    ("swarm/announced_parts.py", "fetch"): "catches and journals what can go wrong; whoever needs the part asks again",
    ("swarm/blob_fetch.py", "_start"): "ends the fetch, whoever waits for it is told",
    ("swarm/blobs.py", "fetch"): "waited for",
    ("swarm/blobs.py", "fetch_folder"): "waited for as a group",
    ("swarm/enter.py", "visit"): "for as long as one enters, not in a node",
    ("swarm/enter.py", "_charter"): "waited for",
    ("stages/lead.py", "_ask_all"): "catches what an answer can be",
    ("stages/peer.py", "run"): "looked at in each turn",
    ("stages/peer.py", "_look"): "looked at in each turn of `run`",
    ("stages/peer.py", "_advance"): "looked at in each turn of `run`",
    ("stages/outbox.py", "_start"): "what cannot be sent is looked at in each turn of `run`",
}


def made_by_hand(file: Path) -> list[str]:
    """Functions that make a task."""
    found = []

    def walk(node: ast.AST, inside: str) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inside = node.name
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Attribute) and called.attr in ("create_task", "ensure_future"):
            found.append(inside)
        for child in ast.iter_child_nodes(node):
            walk(child, inside)

    walk(ast.parse(file.read_text()), "")
    return found


def test_every_task_is_made_where_somebody_hears_of_its_failure() -> None:
    files = [f for room in ("net", "swarm", "stages") for f in (SOURCE / room).glob("*.py")]
    made = {(str(f.relative_to(SOURCE)), name) for f in files for name in made_by_hand(f)}
    assert made - BY_HAND.keys() == set(), "use `Tasks`, or say here who hears of a failure"
    assert BY_HAND.keys() - made == set()


class Journal:
    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.failed: list[str] = []

    def event(self, kind: str, **fields: Any) -> None:
        self.events.append({"kind": kind, **fields})

    def fail(self, name: str, e: Exception) -> None:
        self.failed.append(f"{name}: {e}")


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks_module, "AGAIN_S", (0.0, 0.0))


def test_what_is_kept_is_started_again_and_told_of_and_ends_the_node_when_it_fails_on() -> None:
    async def story() -> None:
        journal, runs = Journal(), dict[str, int]()
        tasks, done = Tasks(journal.event, journal.fail), asyncio.Event()

        async def work(name: str, failures: int) -> None:
            runs[name] = runs.get(name, 0) + 1
            if runs[name] <= failures:
                raise ValueError(f"failure {runs[name]}")
            done.set()
            await asyncio.Event().wait()

        async def once() -> None:
            raise KeyError("gone")

        tasks.keep("mends itself", lambda: work("mends itself", 3))
        await done.wait()
        assert runs["mends itself"] == 4
        assert [e["failures"] for e in journal.events] == [1, 2, 3]
        assert "mends itself of this node has failed and is started again" in journal.events[0]["text"]
        tasks.keep("never works", lambda: work("never works", 1000))
        await tasks.kept["never works"]
        tasks.keep("must not fail", lambda: work("must not fail", 1), borne=0)
        await tasks.kept["must not fail"]
        await tasks.spawn(once(), "one thing")
        assert journal.failed == ["never works: failure 6", "must not fail: failure 1", "one thing: 'gone'"]
        await tasks.close()

    asyncio.run(story())


def test_a_node_whose_clock_or_one_of_whose_errands_fails_ends_with_a_sentence(tmp_path: Path) -> None:
    async def story(which: str) -> None:
        node = Shore(tmp_path / which).node

        def broken(*_: Any) -> None:
            raise RuntimeError("a defect")

        async def errand() -> None:
            broken()

        if which == "clock":
            node._tick = broken  # type: ignore[method-assign,assignment]
        else:
            node.spawn(errand())
        with pytest.raises(
            TransientError, match=r"of this peer's node has failed \(RuntimeError: a defect\); start it"
        ):
            await node.run()

    for which in ("clock", "errand"):
        asyncio.run(story(which))


@pytest.mark.parametrize("what", ["obey", "status"])
def test_a_node_obeys_and_shows_itself_again_after_either_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Each of the loops beside a node is made to raise; commands are obeyed all the same."""

    async def story() -> None:
        shore = Shore(tmp_path / "node")
        node, left = shore.node, asyncio.Event()
        monkeypatch.setattr(start, "EVERY_S", 0.0)
        monkeypatch.setattr(node, "leave", left.set)
        calls = {"obey": 0, "status": 0}

        def some(name: str, result: Any) -> Any:
            def do(*_: Any) -> Any:
                calls[name] += 1
                if name == what and calls[name] <= 2:
                    raise OverflowError("int too large to convert to float")
                return result

            return do

        monkeypatch.setattr(start, "obey", some("obey", True))
        monkeypatch.setattr(start, "status", some("status", {}))
        config: Any = type("Config", (), {"status_file": tmp_path / "status.json"})()
        works: dict[str, Any] = {
            "the ear for commands": lambda: start.hear_commands(config, shore.roster, node.leave, node.fail),
            "the status": lambda: start._show_for_ever(config, node, None),  # type: ignore[arg-type]
        }
        monkeypatch.setattr(start, "_show", lambda config, node, event: start.status(node, []))
        for name, work in works.items():
            node.tasks.keep(name, work)
        await left.wait()
        while calls["status"] < 4:
            await asyncio.sleep(0)
        assert len(shore.of("task-failed")) == 2
        await node.tasks.close()

    asyncio.run(story())

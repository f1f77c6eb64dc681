"""A group of workers over several nodes, as the supervisor sees it: node 0's by itself, the others' by what their
agents say. Where the disk is not shared their logs are copied here, so that who reads logs need not know of nodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.guard.flights import WAIT_S, Flight, ask
from shoal.guard.nodes.head import Head, Node
from shoal.guard.nodes.process_states import Kernels
from shoal.guard.nodes.talk import Message, unpacked
from shoal.guard.workers import Death, Share, Workers, end, log_file
from shoal.journal.pulse_file import PulseFolder

START_S = 60.0  # for the agents to start their processes
LEAVE_S = 3.0  # a newcomer waits so long for others before the group is asked to make room


@dataclass(frozen=True)
class Seat:
    """A node and the ranks it has in this group."""

    node: Node | None  # None: this one
    share: Share


class NodeGroup:
    def __init__(
        self, head: Head, seats: Sequence[Seat], command: Sequence[str], world: int, attempt: int, logs: Path,
        threads: int, order: Callable[[Share], dict[str, object]], most: int,
    ) -> None:  # fmt: skip
        """`order` is what a node is told to start its share with."""
        self.attempt, self._head, self._log_folder, self._most = attempt, head, logs, most
        mine = next(seat.share for seat in seats if seat.node is None)
        self._others = {seat.node: seat.share for seat in seats if seat.node is not None}
        self._pids: dict[int, int] = {rank: 0 for share in self._others.values() for rank in share.ranks}
        self._told: set[int] = set()
        self._local = Workers(command, world, attempt, logs, threads, mine)
        self.pulses = self._local.pulses
        self.watched = self.kernel = Kernels(mine.ranks, PulseFolder(self.pulses))
        self._spare = set(head.nodes.values()) - set(self._others)  # whom the run cannot be laid over
        self.left: str | None = None  # why it is to be ended and put together anew
        self._flights: dict[int, dict[int, Flight]] = {}  # of the nodes that were asked
        self._regrouping = False
        for node, share in self._others.items():
            head.tell(node, "start", attempt=attempt, **order(share))
        self._early = self._until_started()

    @property
    def pids(self) -> dict[int, int]:
        return self._local.pids | self._pids

    @property
    def nodes(self) -> list[dict[str, object]]:
        """For the journal."""
        return [{"node": n.number, "host": n.host, "ranks": list(s.ranks)} for n, s in self._others.items()]

    def reap(self) -> list[Death]:
        deaths, self._early = [*self._early, *self._local.reap(), *self._heard()], []
        if self._regrouping and not self._told:  # they were asked to leave, and not because the run is to stop
            deaths = [replace(death, told=False) for death in deaths]
        return sorted(deaths, key=lambda death: death.rank)

    def _heard(self) -> list[Death]:
        deaths = []
        for node, said in self._head.heard():
            if node in self._others:
                deaths += self._take(node, said)
            elif said["kind"] == "leaving":
                node.leaving = str(said.get("signal"))
            elif said["kind"] == "disk":
                node.shares = bool(said["shared"])
        return deaths

    def _until_started(self) -> list[Death]:
        """Who looks for hangs must know the pids from the beginning. The deaths that came meanwhile."""
        deaths, deadline = [], time.monotonic() + START_S
        while 0 in self._pids.values() and time.monotonic() < deadline:
            time.sleep(0.02)
            deaths += self._heard()
            for node, share in self._others.items():
                if self._head.nodes.get(node.number) is not node:  # gone before it had a part in this
                    deaths += self._gone(node, share, "it went away as the group was started")
        for node, share in self._others.items():
            if any(self._pids.get(rank) == 0 for rank in share.ranks):
                deaths += self._gone(node, share, f"it started nothing within {START_S:g} s")
        return deaths

    def tell_to_stop(self) -> None:
        self._told |= set(self.pids)
        self._stop()

    def _stop(self) -> None:
        self._local.tell_to_stop()
        for node in self._others:
            self._head.tell(node, "stop", attempt=self.attempt)

    def kill(self) -> None:
        self._told |= set(self.pids)
        self._local.kill()
        for node in self._others:
            self._head.tell(node, "kill", attempt=self.attempt)

    def end(self, grace_s: float, wait: Callable[[float], None]) -> list[Death]:
        return end(self, grace_s, wait)

    def close(self) -> None:
        self.kill()
        self._local.close()

    def flights(self) -> dict[int, Flight]:
        self._flights, waiting = {}, set(self._others)
        for node in waiting:
            self._head.tell(node, "flight", attempt=self.attempt)
        found = ask(list(self._local.pids), self.pulses)
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline and any(n.number not in self._flights for n in waiting):
            self._early += self._heard()
            time.sleep(0.02)
        for theirs in self._flights.values():
            found |= theirs
        return found

    def look(self) -> None:
        """A node that was told to leave, or one that has come: all save, and the group is put together anew."""
        if self.left is None and (new := self._newcomers()):
            self.left = f"{' and '.join(n.words for n in new)} came to the {len(self._others) + 1} that were there"
        if self.left is not None and not self._regrouping and not self._told:
            self._regrouping = True
            self._stop()

    def _newcomers(self) -> list[Node]:
        """Nodes that are connected, have no part in this group, and have waited a moment for others to come too."""
        known = self._spare | set(self._others)
        waiting = [n for n in self._head.nodes.values() if n not in known and n.leaving is None]
        settled = waiting and time.monotonic() - max(n.came for n in waiting) > LEAVE_S
        return waiting if settled and len(self._others) + 1 < self._most else []

    def _take(self, node: Node, said: Message) -> list[Death]:
        share = self._others[node]
        match said["kind"]:
            case "lost":
                return self._gone(node, share, str(said["why"]))
            case "leaving":
                node.leaving = str(said.get("signal"))
                self.left = f"{node.words} was told to leave ({node.leaving})"
        if said.get("attempt") != self.attempt:
            return []  # the last words of a group that is no more
        match said["kind"]:
            case "started":
                for rank, pid in said["pids"].items():
                    if int(rank) in share.ranks and int(rank) in self._pids:
                        self._pids[int(rank)] = int(pid)
            case "pulse":
                own = {rank: one for rank, one in said["ranks"].items() if int(rank) in share.ranks}
                self.kernel.take({**said, "ranks": own}, time.monotonic())
            case "log":
                if (rank := int(said["rank"])) in share.ranks:
                    self._copy_log(rank, unpacked(said["data"]))
            case "flight":
                flights = {int(rank): dict(flight) for rank, flight in said["ranks"].items()}
                self._flights[node.number] = {r: flight for r, flight in flights.items() if r in share.ranks}
            case "died":
                return self._died(said) if int(said["rank"]) in share.ranks else []
        return []

    def _gone(self, node: Node, share: Share, why: str) -> list[Death]:
        words = f"{node.words} has gone: {why}"
        if node.leaving:
            words = f"{node.words} has gone; it was told to leave ({node.leaving})"
        return [self._death(rank, None, None, ("node-lost", words)) for rank in share.ranks if rank in self._pids]

    def _died(self, said: Message) -> list[Death]:
        rank = int(said["rank"])
        if rank not in self._pids:
            return []
        known = said.get("known")
        return [self._death(rank, said.get("exit_code"), said.get("signal"), tuple(known) if known else None)]

    def _death(self, rank: int, code: int | None, signal: int | None, known: tuple[str, str] | None) -> Death:
        pid, log = self._pids.pop(rank), log_file(self._log_folder, self.attempt, rank)
        return Death(rank, pid, code, signal, rank in self._told, time.time(), log, known)

    def _copy_log(self, rank: int, data: bytes) -> None:
        path = log_file(self._log_folder, self.attempt, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab") as file:
            file.write(data)

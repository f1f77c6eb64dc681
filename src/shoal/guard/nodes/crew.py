"""Several nodes as one crew: waits for their agents, seats the ranks, and puts the group together anew when one comes
or goes."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shoal import ways
from shoal.errors import SetupError, SpecError, TransientError
from shoal.guard.begin import write_spec
from shoal.guard.crew import Decision, Ready
from shoal.guard.island_agents import HandsHere
from shoal.guard.nodes.group import NodeGroup, Seat
from shoal.guard.nodes.head import Head, Node
from shoal.guard.nodes.island_agents import NodeHands
from shoal.guard.nodes.talk import FLEET_HOST
from shoal.guard.signals import Signals
from shoal.guard.workers import Share, Start, threads_for
from shoal.journal.rundir import RunDir
from shoal.spec import dump
from shoal.spec.run import Run

COME_S = 600.0  # for as many as are needed
SETTLE_S = 20.0  # for the rest, once there are enough
TICK_S = 0.2


@dataclass
class Nodes:
    """The crew of a run over nodes. `decide` lays the run over a number of processes."""

    run_dir: RunDir
    head: Head
    host: str  # by which the others reach this one
    processes: int  # of each node
    most: int
    least: int
    decide: Callable[[int], tuple[Run, tuple[Decision, ...]]]
    come_s: float = COME_S
    settle_s: float = SETTLE_S
    _mark: str = field(default_factory=lambda: f".seen-{secrets.token_hex(8)}")
    _seated: tuple[Node, ...] = ()
    _world: int = 0

    def gather(self, run: Run, signals: Signals, say: Callable[[str], None]) -> Ready | None:
        began, enough_at, told = time.monotonic(), None, -1
        while not signals.told_to_stop:
            self._hear()
            here = [node for _, node in sorted(self.head.nodes.items()) if node.leaving is None]
            if len(here) + 1 == self.most:
                break
            now = time.monotonic()
            if len(here) + 1 >= self.least:
                enough_at = enough_at if enough_at is not None else now
                if now - enough_at > self.settle_s:
                    break
            else:
                enough_at = None
                if now - began > self.come_s:
                    raise TransientError(self._missing(here))
            if told != len(here) and now - began > 1.0:
                told = len(here)
                say(f"{told + 1} of {self.most} nodes are here; waiting for the others")
            signals.wait(TICK_S)
        if signals.told_to_stop:
            return None
        self._refuse_other_sizes(here)
        self._look_at_disks(here, run, signals)
        if run.fleet.islands > 1:  # each has its processes, however many nodes there are
            return Ready(run, int(run.resources.processes))
        return self._laid(run, here, say)

    def _laid(self, run: Run, here: list[Node], say: Callable[[str], None]) -> Ready:
        """Over all nodes that are here, or as many of them as it can be laid over: a batch of 16 has no thirds."""
        refused: SpecError | None = None
        for count in range(len(here) + 1, self.least - 1, -1):
            self._seated, world = tuple(here[: count - 1]), count * self.processes
            if world == self._world:
                return Ready(run, world)
            try:
                decided, decisions = self.decide(world)
            except SpecError as e:
                if refused is None:
                    say(
                        f"{count} nodes are here, and the run does not go over {world} processes ({str(e).rstrip('.')})"
                    )
                refused = refused or e
                continue
            if first := self._world == 0:
                self._say_way(say)
            self._world = world
            write_spec(self.run_dir, decided)
            return Ready(decided, world, () if first else decisions)
        raise refused or SpecError(f"no node is here and {self.least} are needed.")

    def _say_way(self, say: Callable[[str], None]) -> None:
        """The interface that gloo and NCCL will use; one that the others cannot reach is refused here."""
        if (address := self._address()) is not None:
            ways.settings(address)
            say(ways.sentence(address))

    def start(self, start: Start, ready: Ready, attempt: int, logs: Path) -> NodeGroup:
        with _listening() as socket_of_rank_0:  # it is handed that: a port that is only looked for may be taken again
            return self._start(start.command, ready, attempt, logs, socket_of_rank_0)

    def _start(
        self, command: Sequence[str], ready: Ready, attempt: int, logs: Path, listening: socket.socket
    ) -> NodeGroup:
        master, address = (self.host, int(listening.getsockname()[1])), self._address()
        seats = [Seat(None, Share(0, 0, self.processes, master, address, listening.fileno()))]
        for position, node in enumerate(self._seated, 1):
            # One that came over the loopback is on this machine: whoever reaches this node reaches that one too.
            theirs = address if ways.is_loopback(node.line.own_address) else None
            seats.append(Seat(node, Share(position, position * self.processes, self.processes, master, theirs)))
        about = {
            "run": self.run_dir.name,
            "mark": self._mark,
            "spec": dump(ready.run),
            "world": ready.world,
            "threads": ready.run.resources.threads,
            "master": list(master),
        }

        def order(share: Share) -> dict[str, object]:
            where = {} if share.address is None else {"address": share.address}
            return {**about, **where, "position": share.node, "first": share.first, "count": share.count}

        threads = threads_for(ready.run.resources.threads, self.processes)
        return NodeGroup(self.head, seats, command, ready.world, attempt, logs, threads, order, self.most)

    def _address(self) -> str | None:
        """Of this node, as the others have reached it: not the one that its name has here."""
        reached = [node.line.own_address for node in self._seated or self.head.nodes.values()]
        return next((one for one in reached if not ways.is_loopback(one)), reached[0] if reached else None)

    def hands(self, run_dir: RunDir, lock_fd: int | None) -> NodeHands:
        here = HandsHere(run_dir, lock_fd, {FLEET_HOST: self._address() or self.host})
        return NodeHands(self.head, here, self.most, run_dir.name)

    def over(self, code: int, why: str) -> None:
        (self.run_dir.path / self._mark).unlink(missing_ok=True)
        self.head.close(code, why)

    def _hear(self) -> None:
        for node, said in self.head.heard():
            if said["kind"] == "leaving":
                node.leaving = str(said.get("signal"))
            elif said["kind"] == "disk":
                node.shares = bool(said["shared"])
        for node in self.head.nodes.values():
            if node.leaving is not None:  # its scheduler is counting; the group has saved
                self.head.tell(node, "over", code=143)
                self.head.forget(node)

    def _missing(self, here: list[Node]) -> str:
        gone = sorted(set(range(1, self.most)) - {node.number for node in here})
        named = ", ".join(map(str, gone[:8])) + ("…" if len(gone) > 8 else "")
        return (
            f"{len(here) + 1} of {self.most} nodes are here after {self.come_s:g} s and {self.least} are needed; "
            f"missing: {named}. Look at what the scheduler says of them, and whether they may reach port "
            f"{self.head.port} of this one."
        )

    def _refuse_other_sizes(self, here: list[Node]) -> None:
        if other := next((node for node in here if node.processes != self.processes), None):
            raise SetupError(
                f"{other.words} has {other.processes} processes and this node {self.processes}; all must have the same."
            )

    def _look_at_disks(self, here: list[Node], run: Run, signals: Signals) -> None:
        """Who does not see this run directory gets a copy of what it needs; its checkpoints must go elsewhere."""
        (self.run_dir.path / self._mark).touch()
        for node in here:
            if node.shares is None:
                self.head.tell(node, "look", run=self.run_dir.name, mark=self._mark)
        deadline = time.monotonic() + 30.0
        while time.monotonic() < deadline and not signals.told_to_stop:
            self._hear()
            if all(node.shares is not None or self.head.nodes.get(node.number) is not node for node in here):
                break
            signals.wait(TICK_S)
        apart = next((node for node in here if node.shares is False), None)
        if apart is not None and (run.checkpoint.local or run.fleet.islands > 1):
            raise SetupError(
                f"{apart.words} does not see {self.run_dir.path} of this node: put launch.workspace on a disk that all "
                "nodes share, or, without islands, keep checkpoints in a bucket (checkpoint.remote, with "
                "checkpoint.local: false)."
            )


def _listening() -> socket.socket:
    """For rank 0's store, at a port that is free, over both families where there are both."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", 0), family=family, dualstack_ipv6=both, backlog=4096)

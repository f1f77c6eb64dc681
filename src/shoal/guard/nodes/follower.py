"""What the agent of every node but the first does: it starts workers when it is told to, and says what becomes of them.

It decides nothing. When node 0 cannot be reached its workers are ended, for a group that nobody watches must not go on;
islands do go on, they need nobody. It then looks for node 0 again, which the scheduler may have put somewhere else.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from shoal import wire
from shoal.errors import TRANSIENT, TransientError
from shoal.guard.classify import classify
from shoal.guard.island_agents import HandsHere
from shoal.guard.nodes.inbox import Inbox
from shoal.guard.nodes.share import RunningShare, sees
from shoal.guard.nodes.talk import EVERY_S, FLEET_HOST, HELLO, LOST, Line, Message
from shoal.guard.signals import Signals, signal_name
from shoal.journal.rundir import RunDir

FIND_S = 600.0  # node 0 may still be waiting for its machine, or for another one
TRY_S = 5.0
LEAVE_S = 20.0  # for node 0's answer, once this one was told to leave and its processes have ended


@dataclass
class Follower:
    head: tuple[str, int]
    token: bytes
    node: int
    processes: int
    workspace: Path
    _islands: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def run(self) -> int:
        """Until node 0 says that it is over; its exit code."""
        with Signals() as signals:
            try:
                while True:
                    line = self._find(signals)
                    if line is None:
                        _say("told to stop while looking for node 0")
                        return TRANSIENT
                    code = _Talk(self, line, signals).code()
                    if code is not None:
                        return code
                    _say(f"node 0 at {wire.text_of(self.head)} has gone; looking for it again")
            finally:
                for island in self._islands.values():  # nobody would end them
                    island.kill()

    def _find(self, signals: Signals) -> Line | None:
        """A connection to node 0. Its name may not be known yet, nobody may listen yet; None: told to stop."""
        deadline, wait_s, last = time.monotonic() + FIND_S, 0.1, "nobody answers"
        while time.monotonic() < deadline:
            if signals.told_to_stop:
                return None
            try:
                sock = socket.create_connection(self.head, timeout=TRY_S)
            except OSError as e:
                last = e.strerror or str(e)
            else:
                try:
                    wire.greet(sock, self.token, HELLO)
                    line = Line(sock)
                    line.send("node", node=self.node, host=socket.gethostname(), processes=self.processes)
                    return line
                except LOST as e:
                    sock.close()
                    last = str(e)
            signals.wait(wait_s)
            wait_s = min(2.0, wait_s * 1.5)
        raise TransientError(
            f"node {self.node} could not reach node 0 at {wire.text_of(self.head)} for {FIND_S / 60:.0f} minutes "
            f"({last}); is it running, and may this node connect to that port?"
        )

    def island(self, island: int, run: str, address: str) -> int:
        """Starts it unless it is there; its agent's pid."""
        there = self._islands.get(island)
        if there is None or there.poll() is not None:
            hands = HandsHere(RunDir.of(run, self.workspace), None, {FLEET_HOST: address})
            there = self._islands[island] = hands.start(island)
        return there.pid

    def signal_islands(self, number: int, only: int | None = None) -> None:
        for island, process in self._islands.items():
            if only in (None, island):
                with suppress(ProcessLookupError):
                    process.send_signal(number)

    def ended_islands(self) -> dict[int, int]:
        ended = {island: code for island, p in self._islands.items() if (code := p.poll()) is not None}
        for island in ended:
            del self._islands[island]
        return ended

    @property
    def busy(self) -> bool:
        return bool(self._islands)


class _Talk:
    """One connection to node 0, from its first word to its last."""

    def __init__(self, follower: Follower, line: Line, signals: Signals) -> None:
        self._follower, self._line, self._signals = follower, line, signals
        self._share: RunningShare | None = None
        self._inbox = Inbox(line)

    def code(self) -> int | None:
        """Does as it is told; the exit code when it is over, None when node 0 is gone."""
        said_leaving, leave_by = False, float("inf")
        with ExitStack() as stack:
            stack.callback(self._line.close)
            stack.callback(self._end_share)
            try:
                while True:
                    for message in self._inbox.take():
                        if message["kind"] == "over":
                            if why := str(message.get("why", "")):  # a scheduler may look at this node's words first
                                _say(f"node 0 has ended: {why.rstrip('.')}")
                            return int(message["code"])
                        self._obey(message)
                    if self._inbox.lost is not None:
                        return None
                    if self._signals.told_to_stop and not said_leaving:
                        said_leaving = True
                        self._line.send("leaving", signal=signal_name(self._signals.stops[0]))
                        self._follower.signal_islands(signal.SIGTERM)  # of a group, node 0 tells all ranks together
                    self._tell()
                    working = self._follower.busy or (self._share is not None and self._share.workers.pids)
                    if said_leaving and not working:
                        leave_by = min(leave_by, time.monotonic() + LEAVE_S)
                    if time.monotonic() > leave_by:
                        return TRANSIENT
                    self._signals.wait(0.1 if working else EVERY_S)
            except LOST:
                return None

    def _obey(self, message: Message) -> None:
        share, line = self._share, self._line
        match message["kind"]:
            case "look":
                seen = sees(str(message["run"]), str(message["mark"]), self._follower.workspace)
                line.send("disk", shared=seen)
            case "start":
                self._end_share()
                self._share = share = RunningShare.begin(message, self._follower.workspace, line.own_address)
                line.send("started", attempt=share.attempt, pids={str(r): p for r, p in share.workers.pids.items()})
            case "stop" if share is not None:
                share.workers.tell_to_stop()
            case "kill" if share is not None:
                share.workers.kill()
            case "flight" if share is not None:
                share.send_flights(line)
            case "island":
                island = int(message["island"])
                pid = self._follower.island(island, str(message["run"]), line.own_address)
                line.send("island-started", island=island, pid=pid)
            case "signal":
                self._follower.signal_islands(int(message["number"]), int(message["island"]))

    def _tell(self) -> None:
        for island, code in self._follower.ended_islands().items():
            self._line.send("island-ended", island=island, code=code)
        if self._share is None:
            self._line.send("here")
        else:
            _tell_of(self._share, self._line)

    def _end_share(self) -> None:
        if self._share is not None:
            self._share.close()
            self._share = None


def _tell_of(share: RunningShare, line: Line) -> None:
    share.send_logs(line)
    for death in share.workers.reap():
        share.send_logs(line)  # its last words before its end
        failure = classify(death, share.around.change())
        line.send(
            "died",
            attempt=share.attempt,
            rank=death.rank,
            exit_code=death.exit_code,
            signal=death.signal,
            known=[failure.cause, failure.evidence],
        )
    share.send_pulses(line)


def _say(sentence: str) -> None:
    print(f"shoal: {sentence}.", file=sys.stderr, flush=True)

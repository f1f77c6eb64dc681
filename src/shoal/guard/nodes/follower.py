"""What the agent of every node but the first does: it starts workers when it is told to, and says what becomes of them.

It decides nothing. When node 0 cannot be reached its workers are ended, for a group that nobody watches must not go on;
it then looks for node 0 again, which the scheduler may have put somewhere else.
"""

from __future__ import annotations

import socket
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from shoal import wire
from shoal.errors import TRANSIENT, WRONG_ENVIRONMENT, WRONG_USAGE, TransientError
from shoal.guard.classify import classify
from shoal.guard.nodes.inbox import Inbox
from shoal.guard.nodes.share import RunningShare, sees
from shoal.guard.nodes.talk import EVERY_S, HELLO, LOST, Line, Message
from shoal.guard.signals import Signals, signal_name

FIND_S = 600.0  # node 0 may still be waiting for its machine, or for another one
TRY_S = 5.0
AFTER_S = 3.0  # node 0 leaves first with a code that ends a job for good: its last words would go with its container
LEAVE_S = 20.0  # for node 0's answer, once this one was told to leave and its workers have ended


@dataclass(frozen=True)
class Follower:
    head: tuple[str, int]
    token: bytes
    node: int
    processes: int
    workspace: Path

    def run(self) -> int:
        """Until node 0 says that it is over; its exit code."""
        with Signals() as signals:
            while True:
                line = self._find(signals)
                if line is None:
                    _say("told to stop while looking for node 0")
                    return TRANSIENT
                code = self._serve(line, signals)
                if code in (WRONG_USAGE, WRONG_ENVIRONMENT):
                    signals.wait(AFTER_S)
                if code is not None:
                    return code
                _say(f"node 0 at {wire.text_of(self.head)} has gone; looking for it again")

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

    def _serve(self, line: Line, signals: Signals) -> int | None:
        """Do as it says; the exit code when it is over, None when node 0 is gone."""
        share: RunningShare | None = None
        said_leaving, leave_by = False, float("inf")
        with ExitStack() as stack:
            stack.callback(line.close)
            inbox = Inbox(line)
            try:
                while True:
                    for message in inbox.take():
                        match message["kind"]:
                            case "over":
                                return int(message["code"])
                            case "start":
                                if share is not None:
                                    share.close()
                                share = self._start(line, message)
                                stack.callback(share.close)
                            case "look":
                                seen = sees(str(message["run"]), str(message["mark"]), self.workspace)
                                line.send("disk", shared=seen)
                            case "stop" if share is not None:
                                share.workers.tell_to_stop()
                            case "kill" if share is not None:
                                share.workers.kill()
                    if inbox.lost is not None:
                        return None
                    if signals.told_to_stop and not said_leaving:
                        said_leaving = True
                        line.send("leaving", signal=signal_name(signals.stops[0]))
                    if share is not None:
                        self._tell(line, share)
                    else:
                        line.send("here")
                    if said_leaving and leave_by == float("inf") and (share is None or not share.workers.pids):
                        leave_by = time.monotonic() + LEAVE_S
                    if time.monotonic() > leave_by:
                        return TRANSIENT
                    signals.wait(min(EVERY_S, 0.1 if share and share.workers.pids else EVERY_S))
            except LOST:
                return None

    def _start(self, line: Line, order: Message) -> RunningShare:
        share = RunningShare.begin(order, self.workspace)
        line.send("started", attempt=share.attempt, pids={str(r): p for r, p in share.workers.pids.items()})
        return share

    def _tell(self, line: Line, share: RunningShare) -> None:
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

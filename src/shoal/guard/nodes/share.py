"""A node's share of a group while it runs: its workers, and what of them node 0 has not been told yet."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from shoal.guard.flights import ask
from shoal.guard.nodes.talk import EVERY_S, Line, Message, packed
from shoal.guard.signs import Kernel
from shoal.guard.surroundings import Surroundings
from shoal.guard.workers import Share, Workers, log_file, threads_for
from shoal.journal.pulse_file import SIZE, news, pulse_file
from shoal.journal.rundir import RunDir
from shoal.plain_file import open_plain

RANKS_PER_S = 4000.0  # that node 0 reads of; more ranks tell it less often
MOST_LOG_BYTES = 256 * 1024  # of one rank in one message


@dataclass
class RunningShare:
    run_dir: RunDir
    attempt: int
    workers: Workers
    around: Surroundings
    shared: bool  # whether node 0's disk is seen from here
    every_s: float = EVERY_S  # of pulses
    _sent: dict[int, int] = field(default_factory=dict)  # bytes of each log
    _told: dict[int, tuple[int, int]] = field(default_factory=dict)  # of each pulse
    _kernel: Kernel = field(default_factory=Kernel)
    _pulsed: float = 0.0

    @classmethod
    def begin(cls, order: Message, workspace: Path, address: str) -> RunningShare:
        """`address` is this node's on its connection to node 0, which may know a better one."""
        run_dir = RunDir.of(str(order["run"]), workspace)
        shared = sees(run_dir.name, str(order["mark"]), workspace)
        if not shared:
            run_dir.path.mkdir(parents=True, exist_ok=True)
            run_dir.spec_file.write_text(str(order["spec"]))
        host, port = order["master"]
        address = str(order.get("address") or address)
        share = Share(int(order["position"]), int(order["first"]), int(order["count"]), (str(host), int(port)), address)
        attempt, world = int(order["attempt"]), int(order["world"])
        threads = threads_for(order["threads"], share.count)
        around = Surroundings.now(run_dir.path)
        workers = Workers(command(run_dir), world, attempt, run_dir.logs, threads, share)
        every_s = max(EVERY_S, world / RANKS_PER_S)
        return cls(run_dir, attempt, workers, around, shared, every_s, dict.fromkeys(share.ranks, 0))

    def send_logs(self, line: Line) -> None:
        """What the workers have printed since; where the disk is shared it is there already."""
        if self.shared:
            return
        for rank, sent in self._sent.items():
            path = log_file(self.run_dir.logs, self.attempt, rank)
            try:
                with open(open_plain(path), "rb") as file:
                    file.seek(sent)
                    data = file.read(MOST_LOG_BYTES)
            except OSError:
                continue
            if data:
                self._sent[rank] += len(data)
                line.send("log", attempt=self.attempt, rank=rank, data=packed(data))

    def send_pulses(self, line: Line) -> None:
        """Also a sign of life of this node: it is sent when there is nothing new to tell."""
        if time.monotonic() - self._pulsed < self.every_s:
            return
        self._pulsed = time.monotonic()
        ranks = {}
        for rank, pid in self.workers.pids.items():
            before, signs = self._told.get(rank, (0, 0)), self._kernel.signs(rank, pid)
            pulse, self._told[rank] = news(_read(pulse_file(self.workers.pulses, rank)), before)
            ranks[str(rank)] = {"state": signs.state, "io_bytes": signs.io_bytes, "pulse": packed(pulse)}
            if self._told[rank][0] != before[0]:
                self._kernel.moves(rank, pid)
            else:  # it has marked nothing since: what do its threads do?
                ranks[str(rank)] |= asdict(self._kernel.threads(rank, pid))
        line.send("pulse", attempt=self.attempt, now=self._pulsed, ranks=ranks)

    def send_flights(self, line: Line) -> None:
        """What NCCL's flight recorder says of its ranks; they are about to be killed."""
        found = ask(list(self.workers.pids), self.workers.pulses)
        line.send("flight", attempt=self.attempt, ranks={str(rank): flight for rank, flight in found.items()})

    def close(self) -> None:
        self.workers.close()


def sees(run: str, mark: str, workspace: Path) -> bool:
    """Whether the file that node 0 has just written is there. A network file system may need a moment to show it."""
    path = RunDir.of(run, workspace).path / mark
    for _ in range(20):
        if path.exists():
            return True
        if not path.parent.exists():
            return False
        time.sleep(0.1)
    return False


def command(run_dir: RunDir) -> list[str]:
    return [sys.executable, "-m", "shoal.train", "--worker", str(run_dir.path)]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()[:SIZE]
    except OSError:
        return b""

"""`python -m shoal.track.mirror RUN_DIR [--until-closed]`: copies the journal to the trackers, from another process.

Training never waits for it: it reads a file. With `--until-closed` it follows until the session ends, then has
`--grace-s` to finish; what was not uploaded is left for `shoal track sync`. Without it, it uploads what there is.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from shoal.errors import DONE, TRANSIENT, ShoalError
from shoal.journal.journal import Journal
from shoal.journal.rundir import RunDir
from shoal.journal.tail import is_closed
from shoal.leaving import leave_at_once
from shoal.track.about import about
from shoal.track.destination import Destination, destinations
from shoal.track.pump import Pump

GRACE_S = 15.0
# On a machine that training keeps busy, a niced mirror may only just have loaded its client when the run ends: one that
# is getting on with it has this many times longer than one whose server does not answer.
LONGER_WHEN_HEALTHY = 4
LOOK_EVERY_S = 0.5
# Without a supervisor's lock and without a new record for this long, nobody is running any more.
QUIET_S = 10.0
QUIET_WITHOUT_LOCK_S = 1800.0  # started by hand or by torchrun: there is no lock to ask, and a step may take long
NICENESS = 19
SYNC_TRIES = 2


class Mirror:
    """All destinations of one run, one thread each."""

    def __init__(self, run_dir: RunDir, until_closed: bool, say: Callable[[str], None] | None = None) -> None:
        self._run_dir = run_dir
        self._ended: str | None = None if until_closed else "now"
        self._hurry = threading.Event()
        told = about(run_dir)
        say = say or self._warn
        tries = None if until_closed else SYNC_TRIES

        def pump(to: Destination) -> Pump:
            return Pump(run_dir, to, told, lambda: self._ended, self._hurry, say, self._log, tries)

        self.pumps = [pump(to) for to in destinations(run_dir, told.track)]

    def start(self) -> None:
        for pump in self.pumps:
            pump.start()

    def follow(self, grace_s: float) -> bool:
        """Until the session has ended and all is uploaded, or its grace has passed. True when all is uploaded."""
        self.start()
        watch = Watch(self._run_dir)
        while self._ended is None:
            if not any(pump.is_alive() for pump in self.pumps):
                return False  # every one of them has given up
            time.sleep(LOOK_EVERY_S)
            self._ended = watch.ended()
        self._hurry.set()
        ended_at = time.monotonic()
        while left := [pump for pump in self.pumps if pump.is_alive()]:
            healthy = any(not pump.failing for pump in left)
            if time.monotonic() - ended_at > grace_s * (LONGER_WHEN_HEALTHY if healthy else 1):
                break
            left[0].join(LOOK_EVERY_S)
        for pump in self.pumps:
            if not pump.complete:
                why = pump.failing or "it was too slow"
                self._log(f"{pump.label}: {pump.behind_bytes} bytes of the journal are not uploaded: {why}.")
        return all(pump.complete for pump in self.pumps)

    def sync(self) -> list[Pump]:
        """Uploads what there is, now."""
        self.start()
        for pump in self.pumps:
            pump.join()
        return self.pumps

    def _warn(self, text: str) -> None:
        warn(self._run_dir, text)

    def _log(self, text: str) -> None:
        log(self._run_dir, text)


def warn(run_dir: RunDir, text: str) -> None:
    """Into the journal, which is what the person at the terminal sees."""
    try:
        journal = Journal(run_dir.journal_file)
        journal.append("warning", text=text, source="track")
        journal.close()
    except OSError as e:  # a full disk is for the supervisor to report
        log(run_dir, f"cannot write to the journal: {e}")


def log(run_dir: RunDir, text: str) -> None:
    run_dir.track.mkdir(parents=True, exist_ok=True)
    with open(run_dir.track / "mirror.log", "a") as f:
        f.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {text}\n")


class Watch:
    """Tells when a session is over: it was closed, or its supervisor died without a word."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._size = -1
        self._grew_at = time.monotonic()
        self._closed = False

    def ended(self) -> str | None:
        size = self._run_dir.journal_file.stat().st_size
        if size != self._size:
            self._size, self._grew_at = size, time.monotonic()
            self._closed = is_closed(self._run_dir.journal_file)
        if self._closed:
            return "closed"
        quiet_s = time.monotonic() - self._grew_at
        limit_s = QUIET_S if self._run_dir.pid_file.exists() else QUIET_WITHOUT_LOCK_S
        return "dead" if quiet_s > limit_s and not self._run_dir.supervised() else None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m shoal.track.mirror", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--until-closed", action="store_true", help="follow the run until its session ends")
    parser.add_argument("--grace-s", type=float, default=GRACE_S, help="time to finish once the session has ended")
    args = parser.parse_args(argv)
    run_dir = RunDir(args.run_dir.resolve())
    os.nice(NICENESS - os.nice(0))
    try:
        mirror = Mirror(run_dir, args.until_closed)
    except ShoalError as e:
        warn(run_dir, f"nothing is uploaded to the trackers: {e}")
        return e.exit_code
    if args.until_closed:
        return DONE if mirror.follow(args.grace_s) else TRANSIENT
    return DONE if all(pump.complete for pump in mirror.sync()) else TRANSIENT


if __name__ == "__main__":
    leave_at_once(main())  # a thread that hangs in somebody's client must not keep the process

"""What a runner that was killed has left behind: processes of its units, found by what stands in their environment.

`python -I -S leftovers.py RUNNER SECONDS` is the keeper of one runner. It hears from it through a pipe; when the pipe
ends, or nothing is heard for so long, it ends the runner's units: nobody else may begin them while they run. It imports
nothing but the standard library, and its own environment does not name the runner.
"""

import contextlib
import os
import select
import signal
import sys
import time

MARK = b"SHOAL_BATCH_RUNNER="
LOOK_AGAIN_S = 0.02
DONE = b"."  # the runner has ended its units itself


def of_runners(ids):  # type: ignore[no-untyped-def]  # (Collection[bytes]) -> list[int]
    """The processes of this user that units of these runners are, or have started."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdecimal() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                told = file.read()
        except OSError:  # somebody else's, or gone
            continue
        if MARK in told and any(part[len(MARK) :] in ids for part in told.split(b"\0") if part.startswith(MARK)):
            found.append(int(name))
    return found


def end_all(ids):  # type: ignore[no-untyped-def]  # (Collection[bytes]) -> int
    """Ends them; they may start others meanwhile. How many there were."""
    seen, quiet = set(), 0
    while quiet < 2:
        try:
            pids = of_runners(ids)
        except OSError:  # no /proc here
            return len(seen)
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        seen.update(pids)
        quiet = 0 if pids else quiet + 1
        if pids:
            time.sleep(LOOK_AGAIN_S)
    return len(seen)


def main() -> None:
    runner, patience_s = sys.argv[1].encode(), float(sys.argv[2])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    while select.select([0], [], [], patience_s)[0]:
        said = os.read(0, 4096)
        if DONE in said:
            return
        if not said:
            break
    end_all((runner,))


if __name__ == "__main__":
    main()

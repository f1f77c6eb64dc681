"""One process of a run: joins the others, builds or restores the state, trains, and leaves with an exit code."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

from shoal.decide.load import load
from shoal.errors import DONE, SpecError, Stopped
from shoal.journal.pulse import SILENT, Pulse
from shoal.journal.rundir import RunDir
from shoal.leaving import exit_code
from shoal.parallel.flight import flight_of
from shoal.parallel.place import Place, join, leave
from shoal.parallel.standing import standing
from shoal.spec.run import Run
from shoal.train.session import Session

Work = Callable[[RunDir, Run, Place, "StopFlag", Pulse], None]


def main(run_dir: RunDir, pulse: Pulse = SILENT, do: Work | None = None) -> int:
    """A worker that the supervisor started."""
    stop = StopFlag()
    return outcome(lambda: load(run_dir.spec_file).run, run_dir, stop, pulse=pulse, do=do)


def outcome(
    get_run: Callable[[], Run],
    run_dir: RunDir,
    stop: StopFlag,
    joined: Place | None = None,
    pulse: Pulse = SILENT,
    do: Work | None = None,
) -> int:
    """Does the work, a mesh's or another driver's, and turns what happened into an exit code; the sentence goes to this
    rank's log."""

    def code() -> int:
        run = get_run()
        if do is None and run.fleet.islands > 1:
            raise SpecError(f"fleet.islands is {run.fleet.islands}, and this is no process of an island; set it to 1.")
        pulse.mark("join")
        place = joined or join(run)
        pulse.watch_groups(standing(place))
        pulse.watch_flight(flight_of(place))
        pulse.mark("load")
        try:
            (do or work)(run_dir, run, place, stop, pulse)
        except Stopped as e:
            print(f"shoal: {e}", file=sys.stderr)
            leave(place)
            return e.exit_code
        leave(place)
        return DONE

    return exit_code(code)


def work(run_dir: RunDir, run: Run, place: Place, stop: Callable[[], bool], pulse: Pulse = SILENT) -> None:
    with Session(run_dir, run, place, stop, pulse) as session:
        session.train()


class StopFlag:
    """Set by SIGINT, SIGTERM or SIGUSR2 (Slurm's warning); the loop asks before each step."""

    def __init__(self) -> None:
        self._told = False
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, self._hear)

    def _hear(self, number: int, frame: object) -> None:
        self._told = True

    def __call__(self) -> bool:
        return self._told

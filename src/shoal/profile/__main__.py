"""One process that is profiled: `python -m shoal.profile FOLDER`, started by `shoal profile`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from shoal.errors import DONE
from shoal.leaving import exit_code, leave_at_once


def main(argv: list[str]) -> int:
    folder = Path(argv[0])
    from shoal.decide.load import load
    from shoal.parallel.place import join, leave
    from shoal.profile.capture import Asked, capture
    from shoal.profile.processes import ASKED, SPEC
    from shoal.train.worker import StopFlag

    stop = StopFlag()

    def do() -> int:
        asked = json.loads((folder / ASKED).read_text())
        run = load(folder / SPEC).run
        place = join(run)
        capture(run, place, Path(asked["workspace"]), folder, Asked(asked["steps"], asked["warmup"]), stop)
        leave(place)
        return DONE

    return exit_code(do)


if __name__ == "__main__":
    leave_at_once(main(sys.argv[1:]))

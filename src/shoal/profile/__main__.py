"""One process that is profiled: `python -m shoal.profile FOLDER`, started by `shoal profile`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from shoal.errors import DONE


def main(argv: list[str]) -> int:
    folder = Path(argv[0])
    from shoal.parallel.place import join, leave
    from shoal.profile.capture import Asked, capture
    from shoal.profile.session import ASKED, SPEC
    from shoal.spec import load
    from shoal.train.worker import StopFlag, exit_code

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
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # torch's own teardown takes seconds and has nothing to save

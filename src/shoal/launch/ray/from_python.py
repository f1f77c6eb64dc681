"""For a program that uses Ray already: `shoal.launch.ray.run("run.yaml")` trains on the cluster it is connected to."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.decide.load import load
from shoal.errors import SetupError, needs_extra
from shoal.guard.history import History
from shoal.guard.signals import Signals
from shoal.journal.rundir import RunDir
from shoal.journal.rundir import workspace as the_workspace
from shoal.launch.ray.checks import check
from shoal.launch.ray.round import Stop
from shoal.launch.ray.submission import job_id
from shoal.launch.send import checked, request_of
from shoal.spec import Run


@contextmanager
def _stop() -> Iterator[Stop]:
    """Ctrl-C and SIGTERM save and end the run, where signals can be heard: on the main thread."""
    if threading.current_thread() is threading.main_thread():
        with Signals() as signals:
            yield signals
    else:
        yield _Nobody()


class _Nobody:
    told_to_stop = False
    told_twice = False

    def wait(self, timeout_s: float) -> None:
        time.sleep(timeout_s)


def run(
    run: Run | str | os.PathLike[str], address: str | None = None, workspace: str | os.PathLike[str] | None = None
) -> int:
    """Trains it on the nodes that its `launch` section asks for, prints what they say, and returns the exit code
    (0 done, 143 told to stop and saved, 2 and 78 wrong, 75 out of restarts). A run that exists goes on.

    The program is connected to Ray already, or is connected to `address` (empty: as `ray.init` finds it).
    """
    try:
        import ray
    except ImportError:
        raise needs_extra("ray[default]", "ray", "shoal.launch.ray.run") from None
    from shoal.launch.ray.driver import drive  # a program too, which must not be imported before it runs

    spec = run if isinstance(run, Run) else load(Path(run)).run
    launch = spec.launch.model_copy(update={"on": "ray"})
    run_dir = RunDir.of(spec.name, the_workspace(workspace))
    begun = run_dir.exists() and History.of(run_dir).saved_step > 0
    request = request_of(checked(spec.model_copy(update={"launch": launch}), begun), run_dir.workspace)
    check(request)
    if not ray.is_initialized():
        try:
            ray.init(address=address or "auto", log_to_driver=False)
        except ConnectionError as e:
            raise SetupError(
                f"no Ray cluster answers at {address or 'this machine'}; start one (`ray start --head`) or connect "
                "with ray.init() before."
            ) from e
    with _stop() as stop:
        return drive(request, job_id(request), request.secret_env(), stop)

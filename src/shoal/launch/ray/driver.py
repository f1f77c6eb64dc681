"""What runs on the Ray cluster for a job: `python -m shoal.launch.ray.driver bundle.tar.gz --job ID --workspace DIR`.

It asks for the nodes, keeps the agents there, starts them again within the budget and leaves with the exit code of
node 0's: 0 done, 2 and 78 never again, 75 after all restarts are spent, 143 told to stop and saved. Ray itself starts
nothing again: it could not tell these apart.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tarfile
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path

from shoal.decide.load import load
from shoal.errors import DONE, TOLD_TO_STOP, TRANSIENT, SetupError, ShoalError, needs_extra
from shoal.guard.budget import Budget
from shoal.guard.signals import Signals
from shoal.launch.bundle import Bundle
from shoal.launch.ray.checks import KUBERAY
from shoal.launch.ray.mailbox import AT_ONCE, SECRETS, key
from shoal.launch.ray.places import Places, with_cores
from shoal.launch.ray.round import NEVER_AGAIN, Job, Round, Stop, say
from shoal.launch.request import BACKOFF_S, LONGEST_BACKOFF_S, Request
from shoal.plain_file import read_plain
from shoal.values import BadValue, by_name, read_object, text

MOST_BYTES = 256 << 20  # of the code that travels


def drive(
    request: Request, job_id: str, secrets: Mapping[str, str], stop: Stop, at_once: Callable[[], bool] = lambda: False
) -> int:
    """The job from its first node to its end; Ray is initialised. `secrets` are those of `request.secret_env`."""
    import ray

    request = with_cores(request)
    launch = request.launch
    losses = Budget(launch.requeues, request.run.guard.backoff_s)  # of machines: the next one may be well at once
    failures = Budget(launch.requeues, BACKOFF_S)  # of the run, after the restarts of its own supervisor
    job = Job(request, job_id, ray.put(request.bundle.tar()), secrets, stop, at_once, losses)
    places = Places(request, job_id)
    try:
        while True:
            with closing(Round(job, places)) as this:
                ended = this.run()
            if ended.code == DONE or ended.code in NEVER_AGAIN or stop.told_to_stop:
                return ended.code
            budget = losses if ended.lost else failures
            wait_s = budget.spend(job.progress.made())
            if wait_s is None:
                say(f"gave up: it was started {launch.requeues} times again without progress (launch.requeues)")
                return TRANSIENT
            if ended.time_is_up:  # others may have waited for these nodes
                places.free()
                places = Places(request, job_id)
                continue
            if not ended.lost:
                wait_s = min(BACKOFF_S * 2 ** (failures.used - 1), LONGEST_BACKOFF_S)
            say(f"all agents start again in {wait_s:g} s, from the newest checkpoint")
            if _told_within(wait_s, stop):
                return TOLD_TO_STOP
    finally:
        places.free()


def _told_within(seconds: float, stop: Stop) -> bool:
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0 and not stop.told_to_stop:
        stop.wait(min(left, 1.0))
    return stop.told_to_stop


def request_in(file: Path, workspace: str, python: str) -> Request:
    """What was asked for, out of the bundle that travelled."""
    try:
        bundle = Bundle.of_tar(read_plain(file, MOST_BYTES))
        if Bundle.RUN_FILE not in bundle.files:
            raise tarfile.TarError(f"it has no {Bundle.RUN_FILE}")
    except (OSError, EOFError, ValueError, KeyError, tarfile.TarError, zlib.error) as e:
        said = str(e).partition("\n")[0].rstrip(":")[:200]
        raise SetupError(f"{file} cannot be read ({said}); launch the run again.") from e
    with tempfile.TemporaryDirectory() as folder:
        run_file = Path(folder) / Bundle.RUN_FILE
        run_file.write_bytes(bundle.files[Bundle.RUN_FILE])
        run = load(run_file).run
    # As the sender saw them: here "this folder" and "this Python" would mean others.
    launch = run.launch.model_copy(update={"workspace": workspace, "python": python})
    return Request(run.model_copy(update={"launch": launch}), Path(workspace), bundle)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m shoal.launch.ray.driver", description=__doc__)
    parser.add_argument("bundle", type=Path, metavar="BUNDLE.tar.gz")
    parser.add_argument("--job", required=True, metavar="ID")
    parser.add_argument("--workspace", required=True, metavar="DIR", help="on the nodes")
    parser.add_argument("--python", required=True, metavar="PROGRAM", help="of the agents")
    args = parser.parse_args(argv)
    try:
        request = request_in(args.bundle, args.workspace, args.python)
        _connect()
        job = args.job
        if request.launch.ray.address == KUBERAY:  # a job of the same name that comes later has another cluster
            job = f"{job}/{os.environ.get('RAY_CLUSTER_NAME', '')}"
        with Signals() as signals:
            return drive(request, job, _secrets(request, job), signals, lambda: _asked_to_be_quick(job))
    except ShoalError as e:
        print(f"shoal: {e}", file=sys.stderr, flush=True)
        return e.exit_code


def _connect() -> None:
    try:
        import ray
    except ImportError:
        raise needs_extra("ray[default]", "ray", "launch.on: ray") from None
    try:
        # The actors say what their agents say; Ray would print it again.
        ray.init(log_to_driver=False, logging_level=logging.WARNING)
    except RuntimeError as e:  # the versions of Ray or Python differ
        raise SetupError(f"{sys.executable} cannot join the Ray cluster: {' '.join(str(e).split())}") from e


def _secrets(request: Request, job: str) -> dict[str, str]:
    """What the sender put aside for us, taken out so that nobody else finds it."""
    from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get

    found = _internal_kv_get(key(SECRETS, job))
    if not found:  # nothing but references: KubeRay
        return request.secret_env(os.environ)
    _internal_kv_del(key(SECRETS, job))
    try:
        return by_name(lambda said: text(said, 1 << 20))(read_object(found.partition(b"\n")[2]))
    except BadValue as e:
        raise SetupError(f"the secrets of job {job} in Ray's store are damaged ({e}); launch the run again.") from None


def _asked_to_be_quick(job: str) -> bool:
    from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_exists

    asked = bool(_internal_kv_exists(key(AT_ONCE, job)))
    if asked:
        _internal_kv_del(key(AT_ONCE, job))
    return asked


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)

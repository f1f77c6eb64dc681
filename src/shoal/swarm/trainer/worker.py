"""A peer's trainer: `python -m shoal.swarm.trainer.worker RUN_DIR`, started by its node (`shoal.swarm.node`).

SHOAL_SWARM_SOCKET is where the node listens, SHOAL_SWARM_FOLDER where large things lie as files. A peer may have
several processes (resources.processes): the first one starts the others and talks to the node for all of them.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from shoal.codec import codec, warm
from shoal.data.windows import Windows
from shoal.decide.auto import decide
from shoal.decide.load import load
from shoal.devices import cores
from shoal.errors import DONE, SetupError, TransientError
from shoal.journal.journal import Journal
from shoal.journal.rundir import RunDir
from shoal.leaving import exit_code, leave_at_once
from shoal.parallel.place import Place, join, leave
from shoal.spec.run import Run
from shoal.streams import steady
from shoal.swarm.trainer.link import Gone, Link
from shoal.swarm.trainer.mesh import Mesh
from shoal.swarm.trainer.trainer import Trainer
from shoal.train.evaluate import Evaluator
from shoal.train.open_data import open_together
from shoal.train.parts import prepare
from shoal.train.worker import StopFlag

SOCKET, FOLDER = "SHOAL_SWARM_SOCKET", "SHOAL_SWARM_FOLDER"
PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> int:
    stop = StopFlag()
    run_dir = RunDir(Path(argv[0]))

    def do() -> int:
        missing = [name for name in (SOCKET, FOLDER) if name not in os.environ]
        if missing:
            raise SetupError(
                f"{missing[0]} is not set: this process is started by a swarm's node (`shoal swarm join`)."
            )
        started = os.environ.get("WORLD_SIZE")
        run = closed(load(run_dir.spec_file).run, run_dir.workspace, int(started) if started else None)
        with siblings(run, argv):
            place = join(run)
            work(run_dir, run, place, stop)
            leave(place)
        return DONE

    return exit_code(do)


def work(run_dir: RunDir, run: Run, place: Place, stop: Callable[[], bool] = lambda: False) -> None:
    """One process of a peer, with everything decided."""
    torch.set_num_threads(cores.threads(int(run.resources.threads)))
    journal, lock = Journal(run_dir.journal_file) if place.rank == 0 else None, threading.Lock()
    attempt = int(os.environ.get("SHOAL_ATTEMPT", "0"))

    def tell(kind: str, **fields: Any) -> None:
        if journal is not None:
            with lock:
                journal.note(kind, attempt=attempt, **fields)

    parts = prepare(run_dir, run, place)
    evaluator = None
    if run.data.eval:
        sources = open_together(run.data.eval, run.data, run_dir.workspace)
        held_out = Windows.of(sources, run.data)
        evaluator = Evaluator(run, place, parts.model, held_out, tell)
    mesh = Mesh(run, run_dir, parts, evaluator)
    if place.rank:
        mesh.follow()
        return
    warm(codec(run.swarm.codec, run.swarm.chunk, run.swarm.keep))
    tell("start", step=0, world=place.world, resumed_from=None, **parts.about())
    link = Link.to(Path(os.environ[SOCKET]))
    try:
        Trainer(run, mesh, link, Path(os.environ[FOLDER]), tell, stop).train()
    except Gone as e:
        raise TransientError(f"{e}; a peer trains only beside its node, which starts it again.") from None
    except Exception as e:
        with suppress(Gone):
            link.send("failed", why=str(e)[:500])
        raise
    finally:
        if sys.exc_info()[0] is None:
            mesh.leave()
        link.close()


def closed(run: Run, workspace: Path, world: int | None = None) -> Run:
    """The run with nothing left open: the mesh is for the batch of one peer, and train.batch stays the swarm's."""
    peer = run.train.batch // run.swarm.peers if run.swarm.batch == "auto" else int(run.swarm.batch)
    mesh = run.mesh.model_copy(update={"pp": 1}) if run.mesh.pp == "auto" else run.mesh
    train = run.train.model_copy(update={"batch": max(1, peer)})
    decided = decide(run.model_copy(update={"mesh": mesh, "train": train}), workspace, world).run
    return decided.model_copy(update={"train": decided.train.model_copy(update={"batch": run.train.batch})})


@contextmanager
def siblings(run: Run, argv: list[str]) -> Iterator[None]:
    """The other processes of this peer, where there are some and nobody has started them. They end with this one."""
    world = int(run.resources.processes)
    if world == 1 or "RANK" in os.environ:
        yield
        return
    meet = Path(os.environ[FOLDER]).resolve() / f"meet-{secrets.token_hex(8)}"
    common = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "SHOAL_RENDEZVOUS": f"file://{meet}"}
    os.environ.update(common, RANK="0", LOCAL_RANK="0")
    command = [sys.executable, "-m", "shoal.swarm.trainer.worker", *argv]
    others = [
        subprocess.Popen(command, env={**os.environ, "RANK": str(i), "LOCAL_RANK": str(i)}, preexec_fn=_tied)
        for i in range(1, world)
    ]
    try:
        yield
        for other in others:
            other.wait(timeout=30)
    finally:
        for other in others:
            other.kill()
            other.wait()
        meet.unlink(missing_ok=True)


def _tied() -> None:
    """Ends with its parent, however that ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    steady()
    leave_at_once(main(sys.argv[1:]))

"""What a program does with Shoal beside the classes that it extends: opens runs, takes steps, reads what they left."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.errors import DONE, SetupError, ShoalError, Stopped, UsageError
from shoal.spec.run import Run

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.checkpoint.names import Name
    from shoal.data.windows import AnyWindows
    from shoal.launch.job import Job
    from shoal.model.decoder import Decoder
    from shoal.train.session import Session

Where = str | os.PathLike[str]


def load(file: Where, overrides: Sequence[str] = ()) -> Run:
    """A run file with `overrides` such as `train.steps=50` laid over it. Everything wrong with it is said at once, in a
    ShoalError, one sentence a line."""
    from shoal.decide.load import load as read

    return read(file, overrides).run


@contextmanager
def session(run: Run | Where, overrides: Sequence[str] = (), workspace: Where | None = None) -> Iterator[Session]:
    """Opens a run for the steps that are left of it, in this process alone or in each that torchrun has started:

        with shoal.session("run.yaml") as s:
            for step in s.steps():
                record = s.step()

    The run directory is kept as `shoal train` would, so that `ps`, `report`, `resume` and the trackers see no
    difference. A run that has begun goes on from its newest checkpoint. Nobody restarts the process, as a supervisor
    would: to have that, name your loop in the run file (`own.loop`) and use `shoal train`.
    """
    from shoal.journal.rundir import workspace as folder_of
    from shoal.train.under_torchrun import joined

    opened = run if isinstance(run, Run) else load(run, overrides)
    if "RANK" not in os.environ:
        if opened.resources.processes not in (1, "auto"):
            raise UsageError(
                f"resources.processes is {opened.resources.processes}, and this is one process: start the script with "
                f"`torchrun --nproc-per-node {opened.resources.processes}`."
            )
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    with joined(opened, folder_of(workspace)) as here:
        from shoal.parallel.place import leave
        from shoal.train.session import Session

        try:
            with Session(here.run_dir, here.run, here.place, here.stop, here.pulse) as taking:
                yield taking
        except Stopped as e:
            here.code = e.exit_code
            leave(here.place)
            raise
        except ShoalError as e:
            here.code = e.exit_code
            raise
        here.code = DONE
        leave(here.place)


def train_run(file: Where, overrides: Sequence[str] = (), workspace: Where | None = None) -> None:
    """What `shoal train` does: starts the processes, watches them, restarts what fails, and returns when all steps are
    done. SystemExit with the exit code where they are not; what is wrong was printed."""
    _verb("train", file, overrides, workspace)


def launch_run(file: Where, overrides: Sequence[str] = (), workspace: Where | None = None) -> Job:
    """Sends a run to where `launch.on` says, and returns the job. `shoal ps`, `logs` and `stop` know it."""
    from shoal.journal.rundir import RunDir
    from shoal.journal.rundir import workspace as folder_of
    from shoal.launch.own import note
    from shoal.launch.send import alone, checked, request_of, send, where_known

    folder = folder_of(workspace)
    run = where_known(load(file, overrides), folder)
    request = request_of(checked(run), folder)
    note(run)
    with alone(RunDir.of(run.name, folder)):
        return send(request)


def make_model(run: Run, tokenizer_vocab: int | None = None) -> Decoder:
    """The model of a run, on one device, with the weights that a new run begins with. `tokenizer_vocab`: where
    model.vocab_size is `auto`."""
    import torch

    from shoal.errors import SpecError
    from shoal.model.decoder import Decoder
    from shoal.spec.shape import shape_of

    if run.own.computes:
        raise SpecError(f"the model is own code ({run.own.computes}): `shoal.session` makes it, of the run's copy.")
    with torch.device("meta"):
        decoder = Decoder(shape_of(run.model, tokenizer_vocab))
    decoder.to_empty(device="cpu")
    decoder.init_weights(run.seed)
    return decoder


def checkpoints(run_dir: Where) -> list[int]:
    """The steps of which a run has a checkpoint that it could go on from, oldest first."""
    return sorted(name.step for name in _published(run_dir))


def read_checkpoint(run_dir: Where, step: int | None = None) -> tuple[int, dict[str, Tensor]]:
    """(step, the weights by name) of the newest checkpoint of a run, or that of a step. Every byte is checked."""
    from shoal.checkpoint import open_checkpoint, read_full

    found = [name for name in _published(run_dir) if step in (None, name.step)]
    if not found:
        raise SetupError(f"{run_dir} has no checkpoint{'' if step is None else f' of step {step}'}.")
    newest = max(found, key=lambda name: name.step)
    return newest.step, read_full(open_checkpoint(Path(run_dir) / "checkpoints", newest))


def windows(run: Run, workspace: Where | None = None, held_out: bool = False) -> AnyWindows:
    """The data of a run as windows: `windows.batch(sources, numbers)` gives a `shoal.Batch`, `windows.sizes` how many
    there are of each set."""
    from shoal.data.windows import Windows
    from shoal.journal.rundir import workspace as folder_of
    from shoal.own.code import load as load_code
    from shoal.train.open_data import open_own, open_together

    if run.own.data is not None and not held_out:
        make = load_code(run, Path(run.own.folder or ".")).data
        assert make is not None
        return open_own(make, run)
    return Windows.of(
        open_together(run.data.eval if held_out else run.data.train, run.data, folder_of(workspace)), run.data
    )


def _published(run_dir: Where) -> list[Name]:
    from shoal.checkpoint import published

    found = published(Path(run_dir) / "checkpoints")
    return [one.name for one in found if one.on_history and one.there and not one.quarantined]


def _verb(verb: str, file: Where, overrides: Sequence[str], workspace: Where | None) -> None:
    from shoal.cli.main import main

    place = [] if workspace is None else ["--workspace", os.fspath(workspace)]
    code = main([verb, os.fspath(file), *place, *overrides])
    if code != DONE:
        raise SystemExit(code)

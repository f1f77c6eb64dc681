"""What must hold before a run starts: that Shoal can train such a model, and that the inputs are on this machine."""

from __future__ import annotations

from pathlib import Path

from shoal.errors import DataError, SetupError, SpecError
from shoal.spec.base import TASK_FILES
from shoal.spec.drivers import FOREIGN, Driver, driver_of, refusals
from shoal.spec.hf.config import to_hf
from shoal.spec.rules import broken
from shoal.spec.run import Run
from shoal.spec.shape import shape_of


def trainable(run: Run, driver: Driver | None = None) -> None:
    """Refuse what can be written but not trained, and what would have no effect; also the rules of a file, for a `Run`
    that was built in Python. `driver` takes the steps (`shoal.spec.drivers`); None: whoever `shoal train` takes."""
    if run.foreign_work is not None and driver is None:
        verb = "batch" if run.batch is not None else "run"
        raise SpecError(
            f"run '{run.name}' is {run.foreign_work}, and this verb is about Shoal's own training; `shoal {verb}` runs "
            "it here, `shoal launch` elsewhere; `shoal ps`, `logs`, `report`, `stop` and `resume` know it."
        )
    driver = driver or driver_of(run)
    problems = [f"{sentence}." for _, sentence in broken(run)] or [f"{s}." for _, s in refusals(run, driver)]
    if problems:
        raise SpecError("\n".join(problems))
    if run.swarm.stages.count > 1 and driver not in ("cut", "stages"):
        raise SpecError(
            f"swarm.stages.count is {run.swarm.stages.count}: a model cut over peers is trained by `shoal swarm "
            "create` (docs/guide/swarm.md); here the whole model is in one place, so set it to 1."
        )
    if driver in FOREIGN:
        return
    # A model that no Hugging Face class can hold is refused now, not at the export after weeks of training.
    to_hf(shape_of(run.model, tokenizer_vocab=1))


def local_inputs(run: Run, begun: bool = False) -> None:
    """Refuse a run whose local data or weights are not here; what is remote is found out when it is opened.

    A run that has `begun` holds its weights in its checkpoints and needs the ones it started from no more.
    """
    train, held_out = (
        [Path(s.path) for s in sources if "://" not in s.path] for sources in (run.data.train, run.data.eval)
    )
    for name, folders in (("data.train", train), ("data.eval", held_out)):
        for folder in folders:
            pair = folder.parent / "train" in train and folder.parent / "eval" in held_out
            moved = f"; if it has moved: `shoal resume {run.name} {name}=PLACE`" if begun else ""
            _data_set(name, folder, pair and folder.name in ("train", "eval"), moved)
    for file in run.eval.tasks:
        if file.endswith(TASK_FILES) and not Path(file).is_file():
            raise DataError(f"eval.tasks names {file}, which does not exist; correct it, or name a made task.")
    if run.model.weights is not None and not begun:
        _weights(run.model.weights)


def _data_set(name: str, folder: Path, one_of_a_pair: bool, moved: str) -> None:
    # A pair is made by one command, which writes both into the folder that holds them.
    out = f"--eval-fraction 0.05 --out {folder.parent}" if one_of_a_pair else f"--out {folder}"
    make = f"run `shoal data prepare TEXT… {out}` first"
    if not folder.exists():
        raise DataError(f"{name} names {folder}, which does not exist; {make}{moved}.")
    if not folder.is_dir():
        raise DataError(f"{name} names {folder}, which is a file and not a folder of token shards; {make}.")
    if not (folder / "index.json").is_file():
        raise DataError(f"{name} names {folder}, which has no index.json and so is no finished data set; {make}.")


def _weights(where: str) -> None:
    from shoal.checkpoint.locate import holds_checkpoints

    if holds_checkpoints(where):
        return  # opened when its shape was looked up, and again when it is read
    folder = Path(where)
    if not folder.is_dir():
        raise SetupError(
            f"model.weights names {folder}, which is not a folder here; download a Hugging Face model into it "
            f"(`hf download NAME --local-dir {folder}`)."
        )
    if not (folder / "config.json").is_file():
        raise SetupError(f"model.weights names {folder}, which has no config.json; give the folder of a model.")
    if not any(folder.glob("*.safetensors")):
        raise SetupError(f"model.weights names {folder}, which has no *.safetensors; Shoal reads no other weights.")

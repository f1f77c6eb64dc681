"""A model to ask: out of a run's checkpoint, or out of a Hugging Face folder; with its tokenizer and what names it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from shoal.checkpoint import open_checkpoint, published, read_full
from shoal.checkpoint.find import newest_readable
from shoal.checkpoint.foreign.export import tokenizer_of_data
from shoal.data.tokenizer import Tokenizer, load_tokenizer
from shoal.decide.load import load
from shoal.errors import UsageError
from shoal.journal.rundir import RunDir
from shoal.model.decoder import Block, Decoder
from shoal.model.foreign import made
from shoal.model.hf import load_shape, load_weights
from shoal.own.code import NONE, Code
from shoal.own.code import load as load_code
from shoal.spec.run import Run
from shoal.spec.shape import Shape, shape_of

if TYPE_CHECKING:
    from shoal.generate.engine import Engine


@dataclass(frozen=True)
class Opened:
    model: Decoder
    tokenizer: Tokenizer
    name: str
    """Of the run, or of the folder."""
    step: int | None
    folder: Path | None
    """Where a chat template may lie."""

    @property
    def version(self) -> str:
        """What names the weights."""
        return self.name if self.step is None else f"{self.name}@{self.step}"

    def engine(
        self,
        batch: int = 16,
        context: int | None = None,
        exact: bool = False,
        eight_bits: bool = False,
    ) -> Engine:
        from shoal.generate.engine import Engine

        vocab_size = self.tokenizer.vocab_size
        return Engine(
            self.model,
            vocab_size=vocab_size,
            batch=batch,
            context=context,
            exact=exact,
            version=self.version,
            alone=True,
            eight_bits=eight_bits,
        )


@dataclass(frozen=True)
class Wanted:
    """How a model is opened, where it is not as usual."""

    device: str = "auto"
    step: int | None = None
    """None: the newest."""
    tokenizer: str | None = None
    start: str | None = None
    special: bool = False
    own_code: bool = False
    """Whether code that a run brings along may run."""


USUAL = Wanted()


def device_of(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device is cuda, but torch sees no GPU here; leave it out.")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def of_run(run_dir: RunDir, wanted: Wanted = USUAL) -> Opened:
    device = device_of(wanted.device)
    spec = load(run_dir.spec_file).run
    if wanted.tokenizer:
        chosen = load_tokenizer(wanted.tokenizer, start=wanted.start, special=wanted.special)
    else:
        chosen = tokenizer_of_data(spec, wanted.start, wanted.special)
    code = _own_code(spec, run_dir, wanted.own_code)
    found, tensors = _weights(run_dir, wanted.step)
    model = made_of(spec, shape_of(spec.model, chosen.vocab_size), code, tensors).to(device)
    return Opened(model.eval(), chosen, run_dir.name, found, _began_with(spec))


def _began_with(spec: Run) -> Path | None:
    """The Hugging Face folder whose weights the run began with, if it is still there."""
    folder = spec.model.weights and Path(spec.model.weights)
    return folder if folder and (folder / "config.json").is_file() else None


def of_folder(folder: Path, wanted: Wanted = USUAL) -> Opened:
    device = device_of(wanted.device)
    model = _on_meta(load_shape(folder)).to_empty(device="cpu")
    load_weights(model, folder)
    tokenizer = load_tokenizer(wanted.tokenizer or folder, start=wanted.start, special=wanted.special)
    return Opened(model.to(device).eval(), tokenizer, folder.resolve().name, None, folder)


def _weights(run_dir: RunDir, step: int | None) -> tuple[int, dict[str, torch.Tensor]]:
    """The newest good checkpoint's weights (or those of a step). Damage shows only when they are read."""
    if step is not None:
        named = [one.name for one in published(run_dir.checkpoints) if one.name.step == step and one.on_history]
        if not named:
            raise UsageError(
                f"run '{run_dir.name}' has no checkpoint of step {step}; `shoal checkpoint ls` lists them."
            )
        return step, read_full(open_checkpoint(run_dir.checkpoints, named[0]))
    found, tensors = newest_readable(
        run_dir.checkpoints, read_full, lambda words: print(f"shoal: passed over {words}", file=sys.stderr)
    )
    return found.step, tensors


def _own_code(spec: Run, run_dir: RunDir, own_code: bool) -> Code:
    """Of a model that is somebody's own: the run's copy of its code, which runs only if asked to."""
    if spec.own.computes is None:
        return NONE
    if not own_code:
        raise UsageError(
            f"the model of run '{run_dir.name}' is own code ({spec.own.computes}): read {run_dir.code}, and give "
            "--own-code to run it."
        )
    return load_code(spec, run_dir.code)


def made_of(spec: Run, shape: Shape, code: Code, tensors: dict[str, torch.Tensor]) -> Decoder:
    """With the weights of a checkpoint, by their names there."""
    if spec.foreign is None:
        model = _on_meta(shape, code.block)
        model.load_state_dict(tensors, assign=True)
        return model
    own = made(spec, shape, code)
    own.fill(tensors)
    return own


def _on_meta(shape: Shape, block: type[Block] | None = None) -> Decoder:
    with torch.device("meta"):
        return Decoder(shape, block=block or Block)

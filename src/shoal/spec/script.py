"""A run that is somebody's script: which file, how it is called, and how it goes on after a failure."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from shoal.spec.accelerate import Accelerate
from shoal.spec.base import CountOrAuto, LocalPath, Says, Strict
from shoal.spec.launch import Environment

CHECKPOINT = "{checkpoint}"  # in `script.resume`: its path
# What torchrun tells each process, and Shoal as well.
GIVEN = frozenset(
    (
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
        *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
    )
)


def _as_words(value: object) -> object:
    """`args: [--steps, 100]`: YAML reads a number, and a command line knows only text."""
    if isinstance(value, list | tuple):
        return [str(item) if isinstance(item, int | float) and not isinstance(item, bool) else item for item in value]
    return value


def _no_zero(text: str) -> str:
    if "\0" in text:
        raise ValueError("a command line has no zero bytes")
    return text


Word = Annotated[str, AfterValidator(_no_zero)]
Words = Annotated[tuple[Word, ...], BeforeValidator(_as_words), Says("a list of words, such as `[--lr, 1e-3]`")]


class Script(Strict):
    """A training script in the place of Shoal's own training: it is supervised, and takes its own steps."""

    path: LocalPath = Field(description="The Python file.")
    args: Words = Field((), description="Its arguments.")
    env: Environment = Field({}, description="Environment variables, besides those of the shell and of torchrun.")
    processes: CountOrAuto = Field("auto", description="How many of it; `auto`: one a GPU, else one.")
    folder: LocalPath | None = Field(None, description="Where it runs; empty: the folder that it was started from.")
    resume: Words = Field(
        (),
        description="Arguments that are added when a restart can go on from a checkpoint, `{checkpoint}` is its path; "
        "empty: a restart begins anew.",
    )
    checkpoints: Annotated[str, Field(min_length=1)] | None = Field(
        None,
        description="Where its checkpoints are: a path with `*`, from `script.folder`; empty: what it was seen to save "
        "with `torch.save`.",
    )
    probe: bool = Field(
        True,
        description="See its steps, losses and saves, and make saves atomic, without an edit; `false`: only what the "
        "system tells of its processes.",
    )
    horovod: bool | Literal["auto"] = Field(
        "auto",
        description="Give it Shoal's own `horovod.torch`, over torch.distributed; `auto`: where it imports Horovod and "
        "none is installed.",
    )
    accelerate: Accelerate | None = Field(
        None, description="Tell it what `accelerate launch` would; empty: Accelerate is left to the script."
    )

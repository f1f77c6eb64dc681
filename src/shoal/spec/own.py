"""Own code in a run: which objects of the user's modules stand in the place of Shoal's, or beside them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shoal.spec.base import LocalPath, Says, Strict

NAME = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
Object = Annotated[
    str,
    Field(pattern=rf"^{NAME}:{NAME}$", max_length=200),
    Says("`module:object`, such as `mine:Loss`"),
]
Objects = Annotated[tuple[Object, ...], Field(max_length=32), Says("a list of `module:object`")]
Text = Annotated[str, Field(min_length=1, max_length=200)]
Setting = bool | int | float | str
Settings = Annotated[dict[Text, Setting], Field(max_length=200), Says("`{NAME: value, …}`")]


class Own(Strict):
    """Your own code, as `module:object`: modules beside the run file, in `launch.code`, or installed. It is copied into
    the run directory and goes on from there."""

    model: Object | None = Field(
        None, description="The whole model: a torch module, made with the run, that turns tokens into logits."
    )
    block: Object | None = Field(
        None, description="A class in the place of the model's block: a subclass of `shoal.Block`."
    )
    objective: Object | None = Field(
        None, description="The loss: a function of (logits, targets) that gives a sum, or an `shoal.Objective`."
    )
    optimizer: Object | None = Field(
        None, description="Makes a torch optimizer of (named parameters, run); `train.schedule` sets its rates."
    )
    schedule: Object | None = Field(
        None, description="The learning rate's multiple of its peak, as a function of (step, steps)."
    )
    data: Object | None = Field(
        None, description="A class in the place of `data.train`: `source[i]` is a window, `len(source)` how many."
    )
    hooks: Objects = Field((), description="Subclasses of `shoal.Hook`, which are called around each step.")
    loop: Object | None = Field(
        None, description="A function of a `shoal.Session` that takes the steps in the place of Shoal's loop."
    )
    launcher: Object | None = Field(
        None, description="Who starts it in the place of `launch.on`: a class with the five functions of a launcher."
    )
    settings: Settings = Field({}, description="Values for your code, which reads them as `run.own.settings`.")
    folder: LocalPath | None = Field(
        None, description="Where your modules are; empty: `launch.code`, else the folder of the run file."
    )
    changed: Literal["keep", "take", "refuse"] = Field(
        "keep",
        description="Where the files have changed since the run began: `keep` its copy, and say so, `take` the new "
        "ones, or `refuse` to go on.",
    )

    @property
    def computes(self) -> str | None:
        """The code whose work, and memory, no shape tells."""
        return self.model or self.block

    @property
    def objects(self) -> dict[str, str]:
        """Each that trains, by the key that names it. (A launcher does not, and stays where it is.)"""
        single = {
            key: getattr(self, key) for key in ("model", "block", "objective", "optimizer", "schedule", "data", "loop")
        }
        named = {f"own.{key}": value for key, value in single.items() if value is not None}
        return named | {f"own.hooks.{i}": value for i, value in enumerate(self.hooks)}

    @property
    def modules(self) -> list[str]:
        return list(dict.fromkeys(value.partition(":")[0] for value in self.objects.values()))

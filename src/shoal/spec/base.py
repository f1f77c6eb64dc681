"""The base of every section, and the few types that sections share."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator

Auto = Literal["auto"]
Positive = Annotated[int, Field(ge=1)]
CountOrAuto = Positive | Auto
Fraction = Annotated[float, Field(ge=0, lt=1)]


@dataclass(frozen=True)
class Says:
    """Says in words what a value may be, where its type alone would not tell a person."""

    text: str


@dataclass(frozen=True)
class Folder:
    """Marks a value as a path: relative to the run file's folder there, to the current folder elsewhere."""


def absolute(path: str, folder: str | None = None) -> str:
    """A local path made absolute (relative ones from `folder`); an address such as s3://… as it is."""
    if "://" in path or not path:
        return path
    return os.path.abspath(os.path.join(folder or os.getcwd(), os.path.expanduser(path)))


TASK_FILES = (".yaml", ".yml")


def task_files(names: tuple[str, ...], folder: str | None = None) -> tuple[str, ...]:
    """Task files made absolute; names of made tasks as they are."""
    return tuple(absolute(name, folder) if name.endswith(TASK_FILES) else name for name in names)


TaskNames = Annotated[
    tuple[str, ...],
    Folder(),
    Says("a list of task files and of names of made tasks"),
    AfterValidator(task_files),
]
LocalPath = Annotated[str, Field(min_length=1), Folder(), Says("a path"), AfterValidator(absolute)]


class Strict(BaseModel):
    """Frozen, and unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _truth_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Pydantic takes `true` for 1, which turns `steps: true` into a run of one step."""
        items = value if isinstance(value, list | tuple) else (value,)
        if any(isinstance(item, bool) for item in items):
            annotation = cls.model_fields[str(info.field_name)].annotation
            if bool not in (annotation, *get_args(annotation)):
                raise ValueError("true and false are not numbers")
        return value

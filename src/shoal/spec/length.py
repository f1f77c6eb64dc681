"""How long a run is: its steps, or the epochs or tokens that they follow from; and shares of a run, such as `5%`."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from shoal.spec.base import Says

# One of these says how long a run is; one on the command line replaces the others of the file.
WAYS = (("train", "steps"), ("train", "epochs"), ("train", "tokens"))
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_AMOUNT = re.compile(r"([0-9]+(?:\.[0-9]+)?(?:e[0-9]{1,2})?) ?([kmbt]?)", re.ASCII | re.IGNORECASE)
# `warmup_steps: auto`: the first steps of Adam are unsteady, the more the higher the rate. Docs: decision 062.
USUAL_WARMUP, LONGEST_WARMUP = 0.05, 2_000
_SHARE = r"^[0-9]{1,2}(\.[0-9]+)? ?%$"


def _as_tokens(value: Any) -> Any:
    """20B is 20,000,000,000."""
    found = _AMOUNT.fullmatch(value.strip()) if isinstance(value, str) else None
    if found is None:
        return value
    return round(float(found[1]) * _UNITS[found[2].lower()])


def _as_share(value: Any) -> Any:
    """0.05 is 5%."""
    return f"{value:.4%}" if isinstance(value, float) and 0 < value < 1 else value


def _one_spelling(value: int | str) -> int | str:
    if isinstance(value, int) or value == "auto":
        return value
    return f"{float(value.rstrip('% ')):.4f}".rstrip("0").rstrip(".") + "%"


Tokens = Annotated[
    Annotated[int, Field(ge=1, lt=2**63)],
    BeforeValidator(_as_tokens, json_schema_input_type=int | str),
    Says("a number of tokens of at least 1, such as `20000000`, `20M` or `1.5B`"),
]
_Share = Annotated[str, Field(pattern=_SHARE)]
# Steps, or a share of all of them.
Warmup = Annotated[
    Annotated[int, Field(ge=0)] | Literal["auto"] | _Share,
    BeforeValidator(_as_share, json_schema_input_type=int | float | str),
    AfterValidator(_one_spelling),
    Says("`auto`, a whole number of steps of at least 0, or a share of the run below 100%, such as `5%` or `0.05`"),
]
Decay = Annotated[
    Annotated[int, Field(ge=1)] | Literal["auto"] | _Share,
    BeforeValidator(_as_share, json_schema_input_type=int | float | str),
    AfterValidator(_one_spelling),
    Says("`auto`, a whole number of steps of at least 1, or a share of the run below 100%, such as `20%` or `0.2`"),
]


def warmup_steps(warmup: int | str, steps: int) -> int:
    """Of a run of so many steps; a share is rounded, and leaves at least one step."""
    if isinstance(warmup, int):
        return warmup
    if warmup == "auto":
        return min(round(USUAL_WARMUP * steps), LONGEST_WARMUP)
    return min(_share(warmup, steps), steps - 1)


def decay_steps(decay: int | str, steps: int) -> int:
    if isinstance(decay, int):
        return decay
    return max(1, steps // 5 if decay == "auto" else _share(decay, steps))


def _share(text: str, steps: int) -> int:
    return round(float(text.rstrip("%")) / 100 * steps)


def steps_for_tokens(tokens: int, batch: int, seq_len: int) -> int:
    """The steps that read at least so many tokens."""
    return -(-tokens // (batch * seq_len))


def steps_for_epochs(epochs: float, windows: int, batch: int) -> int:
    """The steps that read at least so many times as many windows as there are."""
    return max(1, math.ceil(round(epochs * windows / batch, 6)))

"""The learning rate over a run, as it is asked for, and as it was before the run was prolonged."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from shoal.spec.base import Positive, Strict
from shoal.spec.length import Decay, Warmup

Shape = Literal["cosine", "wsd", "constant"]
Prolong = Literal["keep", "rewarm", "decay", "jump"]
MOST_PAST = 200  # schedules before this one: each is looked through for every step


class Past(Strict):
    """A schedule that a run had until a step."""

    until: Positive = Field(description="The steps that were done when it was replaced.")
    steps: Positive = Field(description="The length of the run, as it was then.")
    name: Shape = Field("cosine", description="Its shape.")
    warmup_steps: Warmup = Field(0, description="Its warm-up.")
    decay_steps: Decay = Field("auto", description="Its final decay (wsd).")
    min_ratio: float = Field(0.1, ge=0, le=1, description="What it would have left of the peak at its end.")
    then: Prolong | None = Field(
        None, description="How the rate went on from there, as in `prolong`; empty: nothing jumped."
    )


class Schedule(Strict):
    """The learning rate over the run, as a multiple of its peak."""

    name: Shape = Field("cosine", description="`wsd`: warm-up, stable, decay.")
    warmup_steps: Warmup = Field(
        "auto", description="Steps of linear warm-up, or a share of the run; `auto`: 5% of it, at most 2,000 steps."
    )
    decay_steps: Decay = Field(
        "auto", description="wsd: steps of the final decay, or a share of the run; `auto`: a fifth of it."
    )
    min_ratio: float = Field(0.1, ge=0, le=1, description="What is left of the peak at the end.")
    prolong: Prolong | None = Field(
        None,
        description="Where a run that has begun gets another length or schedule: `keep` the rate it had, `rewarm` from "
        "there to the peak and go through the schedule again, `decay` from there to the end, or `jump` to where the "
        "new schedule would be. Empty: asked for when the rate would jump.",
    )
    past: tuple[Past, ...] = Field(
        (), max_length=MOST_PAST, description="The schedules before this one, oldest first. `shoal resume` writes them."
    )

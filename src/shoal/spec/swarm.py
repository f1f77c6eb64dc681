"""How peers across the internet train one model. Read by `shoal swarm` and `shoal plan swarm`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shoal.spec.base import Auto, Fraction, Positive, Says, Strict
from shoal.spec.duration import Duration as _Duration

Duration = Annotated[_Duration, Says("a time such as `30 s` or `2 min`")]
DurationOrAuto = Annotated[Auto | _Duration, Says("`auto`, or a time such as `30 s` or `2 min`")]
Share = Annotated[Auto | Annotated[float, Field(ge=0, le=1)], Says("`auto`, or a number from 0 to 1")]
Rate = Annotated[Auto | Annotated[float, Field(gt=0)], Says("`auto`, or a number above 0")]
Momentum = Annotated[Auto | Fraction, Says("`auto`, or a number of at least 0 and below 1")]
Codec = Literal["bf16", "int8", "int4", "2bit", "topk"]


class Stages(Strict):
    """A model that no peer holds alone: its layers on several peers, one after the other."""

    count: Positive = Field(1, description="Stretches that the layers are cut into; 1: every peer holds the model.")
    activations: Literal["fp32", "bf16", "int8", "int4", "int2"] = Field(
        "int8", description="How hidden states and their gradients travel from stage to stage."
    )
    rank: int = Field(
        0,
        ge=0,
        description="Dimensions that blocks write to and that travel; 0: all of model.dim. Changes the model; try 1/8.",
    )
    gradients: Codec = Field("int8", description="How peers of the same stage exchange their summed gradients.")
    in_flight: int = Field(
        0, ge=0, description="Micro-batches that a first peer has begun and not finished; 0: all of a step."
    )
    save_every: Positive = Field(50, description="Steps between saves where checkpoint.every is `auto`.")


class Swarm(Strict):
    """Peers without a common store: rounds of training, and compressed exchanges between them."""

    peers: Positive = Field(
        2,
        description="Peers that the first round (of a cut model: the first step) waits for; more may come at any time.",
    )
    batch: Annotated[Positive | Auto, Says("`auto` or a count")] = Field(
        "auto", description="Windows in an inner step of a peer; `auto`: train.batch / peers, less for slow peers."
    )
    round: Duration = Field("60 s", validate_default=True, description="How long peers train between two exchanges.")
    deadline: DurationOrAuto = Field(
        "auto",
        description="After a round, for the parts to arrive; later ones go into the next. `auto`: three quarters of a "
        "round, half without overlap.",
    )
    quorum: float = Field(0.5, gt=0, le=1, description="Share of the peers whose parts a round needs.")
    overlap: bool = Field(True, description="The exchange runs beside the next round's steps; `false`: peers wait.")
    fragments: Positive = Field(1, description="Parts of the model exchanged in turn, one a round (streaming).")
    codec: Codec = Field("topk", description="How parts travel; `topk`: the largest values, 2 bits each.")
    chunk: Positive = Field(4096, description="topk: parameters that are looked at together.")
    keep: Positive = Field(64, description="topk: how many of each chunk travel.")
    feedback: Share = Field(
        "auto",
        description="Share of what the codec left out that is kept for the next round; `auto`: 0.95 with topk, else 1.",
    )
    outer_lr: Rate = Field("auto", description="Outer learning rate; `auto`: 2.5 with topk, else 0.8.")
    outer_momentum: Momentum = Field("auto", description="Outer Nesterov momentum; `auto`: none with topk, else 0.6.")
    robust: bool = Field(True, description="Parts are clipped, compared and scored, so that broken ones do no harm.")
    partition: Literal["merge", "wait"] = Field(
        "merge", description="A half that is cut off trains on and merges when the link returns, or waits."
    )
    silent: Duration = Field("5 s", validate_default=True, description="A peer not heard of for so long is away.")
    snapshot_every: Positive = Field(20, description="Rounds between states that newcomers begin with.")
    stages: Stages = Field(default_factory=Stages, description="A model cut over peers.")

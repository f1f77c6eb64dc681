"""Which engine shards the model and keeps the optimizer's state: Shoal's own, or DeepSpeed's ZeRO."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from shoal.spec.base import Strict


class Engine(Strict):
    """Who shards the model."""

    name: Literal["native", "deepspeed"] = Field(
        "native",
        description="`native`: FSDP2, DDP and the other axes of `mesh`; `deepspeed`: ZeRO over dp_shard processes. A "
        "run may go from one to the other at a resume.",
    )
    zero: Literal[1, 2, 3] = Field(
        3, description="With `deepspeed`, what ZeRO shards: 1 optimizer state, 2 gradients too, 3 weights too."
    )
    offload: Literal["none", "cpu"] = Field(
        "none",
        description="With `deepspeed`, what waits in the memory of the CPU: `cpu`: optimizer state and master weights, "
        "with zero 3 all weights.",
    )

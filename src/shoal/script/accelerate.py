"""The environment that `accelerate launch` gives a script, from the section of the run file. No torch.

`tests/script/accelerate_golden.json` holds what the real one sets; Accelerate itself reads these in its plugins.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shoal.spec.accelerate import Accelerate, DeepSpeed, Dynamo, Fsdp, Parallelism

# `accelerate launch` tells these to FSDP2 as well, at these values; they are of FSDP1.
_OF_FSDP1 = {
    "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
    "FSDP_FORWARD_PREFETCH": "false",
    "FSDP_USE_ORIG_PARAMS": "true",
    "FSDP_SYNC_MODULE_STATES": "true",
}


def environment(asked: Accelerate) -> dict[str, str]:
    found: dict[str, str] = {"ACCELERATE_MIXED_PRECISION": asked.mixed_precision}
    if asked.deepspeed is None:
        found |= dict(_dynamo(asked.dynamo))
    else:
        found |= dict(_deepspeed(asked.deepspeed))
    if asked.fsdp is not None:
        found |= dict(_fsdp(asked.fsdp))
    if asked.parallelism is not None:
        found |= dict(_parallelism(asked.parallelism))
    return found


def _dynamo(asked: Dynamo) -> Iterator[tuple[str, str]]:
    yield "ACCELERATE_DYNAMO_BACKEND", asked.backend.upper()
    for name in ("mode", "use_fullgraph", "use_dynamic", "use_regional_compilation"):
        yield f"ACCELERATE_DYNAMO_{name.upper()}", str(getattr(asked, name))


def _fsdp(asked: Fsdp) -> Iterator[tuple[str, str]]:
    yield "ACCELERATE_USE_FSDP", "true"
    yield "FSDP_VERSION", "2"
    yield from _OF_FSDP1.items()
    yield "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD", _said(asked.activation_checkpointing == "offload")
    yield "FSDP_ACTIVATION_CHECKPOINTING", _said(asked.activation_checkpointing is not False)
    for name, value in asked:
        if value is not None and name != "activation_checkpointing":
            short = name.replace("transformer_layer_cls", "transformer_cls")
            yield f"FSDP_{short.upper()}", _said(value)


def _deepspeed(asked: DeepSpeed) -> Iterator[tuple[str, str]]:
    yield "ACCELERATE_USE_DEEPSPEED", "true"
    yield "ACCELERATE_CONFIG_DS_FIELDS", ""  # fields of a file of `accelerate config`, of which there is none
    short = {"zero3_init_flag": "zero3_init"}
    for name, value in asked:
        if value is not None:
            of = "" if name.startswith("gradient_") else "DEEPSPEED_"
            yield f"ACCELERATE_{of}{short.get(name, name).upper()}", _said(value)


def _parallelism(asked: Parallelism) -> Iterator[tuple[str, str]]:
    yield "ACCELERATE_USE_PARALLELISM_CONFIG", "true"
    for name in ("dp_replicate", "dp_shard", "tp", "cp"):
        yield f"PARALLELISM_CONFIG_{name.upper()}_SIZE", str(getattr(asked, name))
    yield from (
        ("PARALLELISM_CONFIG_CP_BACKEND", "torch"),
        ("PARALLELISM_CONFIG_SP_SIZE", "1"),
        ("PARALLELISM_CONFIG_SP_BACKEND", "deepspeed"),
    )
    if asked.cp > 1:
        yield "PARALLELISM_CONFIG_CP_COMM_STRATEGY", asked.cp_comm_strategy


def _said(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(value)
    return str(value).lower() if isinstance(value, bool) else str(value)

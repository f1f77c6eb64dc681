"""Runs with nothing left open, as the plan takes them."""

from __future__ import annotations

from typing import Any

from shoal.spec.run import Run


def closed(model: dict[str, Any], **changes: Any) -> Run:
    """A run of the model, with dotted changes; one process unless they say otherwise."""
    mesh = dict.fromkeys(("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"), 1)
    spec: dict[str, Any] = {
        "name": "planned",
        "model": {"vocab_size": 256, **model},
        "data": {"train": "data", "seq_len": 64},
        "train": {"steps": 1, "batch": 2, "precision": "fp32"},
        "mesh": {**mesh, "micro_batch": 2, "schedule": "1f1b", "cp_method": "all_to_all", "recompute": "none"},
        "resources": {"device": "cpu"},
    }
    for dotted, value in changes.items():
        section, key = dotted.split(".")
        spec.setdefault(section, {})[key] = value
    return Run.model_validate(spec)

"""The parity matrix: meshes of every axis, each trained by the real worker and compared with one process.

`benchmarks/parity.py` prints it whole; `tests/train/test_matrix.py` runs a part of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shoal import checkpoint
from shoal.decide.auto import decide
from shoal.journal.rundir import RunDir
from shoal.model.decoder import Decoder
from shoal.spec.mesh import Sizes
from shoal.spec.run import Mesh, Run
from shoal.spec.shape import shape_of
from tests.train.tiny import losses_of, make_data, make_run, steps_of, train_on

STEPS = 10


@dataclass(frozen=True)
class Bars:
    """How far two curves may lie apart, by the numbers that a step is computed with."""

    loss: float  # relative
    norm: float  # relative
    logits: float  # absolute


FLOAT32 = Bars(2e-5, 1e-4, 1e-4)
CLOSER = Bars(1e-5, 1e-5, 1e-4)  # of models that came later, as they are
# On a GPU Muon orthogonalises in bf16 (shoal.train.muon): a last bit of the gradient, which every layout adds up in an
# order of its own, may become a 256th of an entry of the update. Seen on an H200 (pp 2 x tp 2): 9e-6 to 4.5e-5, 3.8e-4,
# 5.5e-3.
ORTHOGONAL_IN_BF16 = Bars(2e-4, 2e-3, 1.2e-2)


WIDTHS = {"dim": 32, "heads": 8, "kv_heads": 4, "head_dim": 8, "ffn_dim": 64}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**WIDTHS, "layers": 4},
    "llama 8": {**WIDTHS, "layers": 8},
    "qwen3 tied": {**WIDTHS, "layers": 4, "family": "qwen3", "qk_norm": True, "tie_embeddings": True},
    "qwen2": {**WIDTHS, "layers": 3, "family": "qwen2", "qkv_bias": True},
    "mixture": {
        **WIDTHS,
        "layers": 4,
        "family": "qwen3_moe",
        "qk_norm": True,
        "experts": {"count": 4, "top_k": 2, "ffn_dim": 32, "dense_layers": 1},
    },
    "bamba": {
        **WIDTHS,
        "layers": 4,
        "family": "bamba",
        "mamba": {"attention_layers": [1], "heads": 8, "state_dim": 16},
    },
    "bamba of groups": {
        **WIDTHS,
        "layers": 4,
        "family": "bamba",
        "tie_embeddings": True,
        "mamba": {"attention_layers": [0, 3], "heads": 4, "state_dim": 8, "groups": 2, "proj_bias": True},
    },
    "gemma3": {
        **WIDTHS,
        "layers": 4,
        "family": "gemma3_text",
        "qk_norm": True,
        "tie_embeddings": True,
        "sliding_window": 12,
        "full_attention_every": 2,
        "sliding_rope_theta": 100.0,
        "query_pre_attn_scalar": 12,
    },
    "deepseek": {
        "dim": 32,
        "heads": 8,
        "ffn_dim": 64,
        "layers": 4,
        "family": "deepseek_v3",
        "mla": {
            "q_lora_rank": 16,
            "kv_lora_rank": 12,
            "qk_nope_head_dim": 6,
            "qk_rope_head_dim": 4,
            "v_head_dim": 8,
        },
        "experts": {
            "count": 8,
            "top_k": 3,
            "ffn_dim": 32,
            "shared": 1,
            "dense_layers": 1,
            "score": "sigmoid",
            "groups": 4,
            "top_groups": 2,
            "routed_scale": 1.5,
        },
    },
}


@dataclass(frozen=True)
class Case:
    model: str
    mesh: dict[str, Any]
    changes: dict[str, Any]

    @property
    def processes(self) -> int:
        return Sizes(**{k: v for k, v in self.mesh.items() if k in Sizes.__dataclass_fields__}).world

    def bars(self, device: str) -> Bars:
        muon = self.changes.get("train.optimizer.name") == "muon"
        if muon and device == "cuda":
            return ORTHOGONAL_IN_BF16
        return CLOSER if device == "cpu" and self.model in ("gemma3", "deepseek") else FLOAT32

    @property
    def name(self) -> str:
        axes = " x ".join(f"{k} {v}" for k, v in self.mesh.items() if k in Sizes.__dataclass_fields__)
        more = [str(v) for k, v in self.mesh.items() if k not in {*Sizes.__dataclass_fields__, "micro_batch"}]
        return ", ".join(
            [f"{self.model}: {axes}", *more, *(f"{k.split('.')[-1]} {v}" for k, v in self.changes.items())]
        )


def case(model: str = "llama", changes: dict[str, Any] | None = None, **mesh: Any) -> Case:
    return Case(model, mesh, changes or {})


PADDED = {"data.packing": "best-fit", "data.seq_len": 64}  # a twentieth of these windows is padding
QUICK = [  # each axis, each schedule of stages but one, each family that has rules of its own
    case(tp=2),
    case(pp=2, schedule="1f1b", micro_batch=4),
    case("qwen3 tied", PADDED, pp=2, schedule="zbv", micro_batch=2),
    case("llama", PADDED, cp=2, cp_method="ring"),
    case("llama", PADDED, cp=2, dp_shard=2, cp_method="all_to_all"),
    case("mixture", tp=2, dp_shard=2, ep=4, recompute="full"),
    case("bamba", PADDED, pp=2, schedule="1f1b", micro_batch=2),
    case("gemma3", PADDED, tp=2),
    case("deepseek", PADDED, dp_shard=2, ep=2),
]
SLOW = [  # products of axes
    case("qwen3 tied", tp=2, dp_shard=2),
    case("qwen3 tied", pp=2, dp_shard=2, schedule="interleaved", micro_batch=2),
    case("mixture", dp_shard=2, ep=2),
    case(dp_replicate=2, tp=2, recompute="selective"),
    case(pp=2, dp_shard=2, tp=2, schedule="1f1b", micro_batch=2),
    case("mixture", pp=2, dp_shard=2, tp=2, ep=2, schedule="zbv", micro_batch=2),
    case("bamba", PADDED, dp_shard=2, tp=2),
]
FULL = [
    *QUICK,
    *SLOW,
    case(dp_replicate=2),
    case(dp_shard=2),
    case(dp_shard=2, reduce="micro_batch", micro_batch=1),
    case("qwen2", tp=2),
    case(pp=2, schedule="gpipe", micro_batch=4),
    case("qwen2", pp=2, schedule="1f1b", micro_batch=2),  # 3 layers over 2 stages
    case("qwen3 tied", pp=2, schedule="1f1b", micro_batch=4),
    case("qwen3 tied", cp=2, cp_method="all_to_all"),
    case("mixture", tp=2, ep=1),
    case("mixture", pp=2, schedule="1f1b", micro_batch=4),
    case(tp=4),
    case(cp=4, cp_method="ring"),
    case(cp=2, tp=2, cp_method="all_to_all"),
    case("qwen3 tied", cp=2, tp=2, cp_method="ring"),
    case(dp_replicate=2, dp_shard=2),
    case("llama 8", pp=4, schedule="zbv", micro_batch=2),
    case("llama 8", pp=4, schedule="interleaved", micro_batch=2),
    case(pp=2, tp=2, schedule="zbv", micro_batch=2),
    case(pp=2, cp=2, schedule="1f1b", micro_batch=4, cp_method="ring"),
    case(pp=2, dp_replicate=2, schedule="1f1b", micro_batch=2),
    case("mixture", dp_shard=4, ep=2),
    case("mixture", dp_replicate=2, dp_shard=2, ep=2),
    case("mixture", cp=2, dp_shard=2, ep=4, cp_method="ring"),
    case(dp_replicate=2, dp_shard=2, tp=2),
    case(dp_shard=2, cp=2, tp=2, cp_method="all_to_all"),
    case("qwen3 tied", pp=2, cp=2, tp=2, schedule="1f1b", micro_batch=2, cp_method="ring"),
    case("qwen3 tied", pp=2, dp_replicate=2, dp_shard=2, schedule="zbv", micro_batch=1),
    case("llama 8", pp=4, tp=2, schedule="interleaved", micro_batch=2, recompute="full"),
    case("mixture", pp=2, dp_shard=4, ep=2, schedule="1f1b", micro_batch=1),
    case("mixture", dp_shard=4, tp=2, ep=4, recompute="selective"),
    case("qwen3 tied", {"train.optimizer.name": "muon"}, pp=2, tp=2, schedule="1f1b", micro_batch=2),
    case("bamba", dp_shard=2),
    case("bamba", dp_replicate=2),
    case("bamba", tp=2, recompute="selective"),
    case("bamba of groups", tp=2, recompute="full"),
    case("bamba of groups", pp=2, dp_shard=2, schedule="zbv", micro_batch=2, recompute="attention"),
    case("bamba", {"train.optimizer.name": "muon"}, pp=2, tp=2, schedule="1f1b", micro_batch=2),
    case("gemma3", PADDED, dp_shard=2),
    case("gemma3", PADDED, pp=2, schedule="1f1b", micro_batch=2),
    case("deepseek", PADDED, tp=2),
    case("deepseek", PADDED, pp=2, schedule="1f1b", micro_batch=2),
    case("gemma3", PADDED, cp=2, cp_method="ring"),
    case("gemma3", PADDED, dp_shard=2, tp=2, recompute="full"),
    case("gemma3", PADDED, tp=2, recompute="selective"),
    case("gemma3", PADDED, cp=2, cp_method="all_to_all"),
    case("deepseek", PADDED, dp_shard=2),
    case("deepseek", PADDED, cp=2, cp_method="ring"),
    case("deepseek", PADDED, cp=2, cp_method="all_to_all"),
    case("deepseek", PADDED, dp_shard=2, tp=2, ep=2, recompute="full"),
    case("deepseek", PADDED, tp=2, recompute="selective"),
]


def _model(name: str) -> dict[str, Any]:
    """From small start values: a tied head's logits begin at the root of the width otherwise; the bar is absolute."""
    return {**MODELS[name], "init": "normal"}


@dataclass(frozen=True)
class Result:
    loss: float  # the largest relative difference over the steps
    norm: float
    logits: float  # the largest difference after the last step
    bars: Bars

    @property
    def good(self) -> bool:
        return self.loss <= self.bars.loss and self.norm <= self.bars.norm and self.logits <= self.bars.logits


@dataclass(frozen=True)
class Job:
    """A run to be trained on so many processes."""

    run: Run
    world: int


class Matrix:
    """Trains cases below a folder; the one-process references are made once for each model."""

    def __init__(self, folder: Path, steps: int = STEPS, device: str = "cpu") -> None:
        self.folder = folder
        self.steps = steps
        self.device = device
        self._alone: dict[str, Job] = {}

    @cached_property
    def data(self) -> Path:
        return make_data(self.folder / "data", documents=240)

    def run(self, case: Case) -> Result:
        for job in self.jobs(case):
            if not RunDir.of(job.run.name, self.folder).exists():
                train_on(job.run, self.folder, job.world)
        return self.result(case)

    def jobs(self, case: Case) -> tuple[Job, Job]:
        """The reference, which several cases may have in common, and the mesh."""
        key = f"{case.model} {case.changes}"
        if key not in self._alone:
            self._alone[key] = self._job(f"alone{len(self._alone)}", case, {"micro_batch": 16}, 1)
        name = "mesh-" + "".join(c if c.isalnum() else "-" for c in case.name)
        return self._alone[key], self._job(name, case, case.mesh, case.processes)

    def result(self, case: Case) -> Result:
        """Of a case whose two jobs were done."""
        a, b = (RunDir.of(job.run.name, self.folder) for job in self.jobs(case))
        assert len(losses_of(a)) == len(losses_of(b)) == self.steps
        norms = [np.array([r["grad_norm"] for r in steps_of(d)]) for d in (a, b)]
        logits = [self._logits(case, d) for d in (a, b)]
        return Result(
            loss=float(np.max(np.abs(losses_of(b) / losses_of(a) - 1))),
            norm=float(np.max(np.abs(norms[1] / norms[0] - 1))),
            logits=float((logits[1] - logits[0]).abs().max()),
            bars=case.bars(self.device),
        )

    def _job(self, name: str, case: Case, mesh: dict[str, Any], world: int) -> Job:
        settings = Mesh(**mesh).model_dump(exclude_unset=True)
        on_gpu = {"resources.device": "cuda", "train.precision": "fp32", "train.compile": False}
        changes = {
            "name": name[:90],
            "model": _model(case.model),
            "train.steps": self.steps,
            **{f"mesh.{axis}": settings.get(axis, 1) for axis in Sizes.__dataclass_fields__},
            **{f"mesh.{key}": value for key, value in settings.items()},
            **(on_gpu if self.device == "cuda" else {}),
            **case.changes,
        }
        return Job(make_run(self.data, **changes), world)

    def _logits(self, case: Case, run_dir: RunDir) -> torch.Tensor:
        """Of the last checkpoint, loaded whole on one process: any mesh's can be."""
        found = checkpoint.newest(run_dir.checkpoints)
        assert found is not None
        assert found.step == self.steps
        model = {key: v for key, v in case.changes.items() if key.startswith("model.")}
        run = decide(make_run(self.data, model=_model(case.model), **model), self.folder, 1).run
        decoder = Decoder(shape_of(run.model))
        decoder.load_state_dict(checkpoint.read_full(found))
        tokens = torch.arange(64).reshape(2, 32) * 7 % 95
        with torch.no_grad():
            return decoder(tokens)

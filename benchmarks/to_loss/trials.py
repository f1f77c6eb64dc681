"""The models that learn, and for how long. `88m` is the shape of the claim; the others keep `auto` from being good at
one shape alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shoal.spec.run import Schedule


@dataclass(frozen=True)
class Trial:
    name: str
    model: dict[str, Any]
    vocab: int
    steps: int
    batch: int
    seq: int
    points: int = 15  # looks at the held-out text
    held_out: int = 256  # windows of it
    lr: float = 1e-3
    optimizers: tuple[str, ...] = ("adamw",)

    @property
    def step_tokens(self) -> int:
        return self.batch * self.seq

    @property
    def tokens(self) -> int:
        return self.steps * self.step_tokens

    @property
    def schedule(self) -> Schedule:
        return Schedule(name="cosine", warmup_steps=max(1, self.steps // 20))


@dataclass(frozen=True)
class Job:
    """One curve."""

    trial: str
    init: str  # a rule, or what a peer begins with
    optimizer: str
    seed: int


_88M = {"dim": 768, "layers": 12, "heads": 12, "kv_heads": 4, "ffn_dim": 2048}
_34M = {"dim": 512, "layers": 8, "heads": 8, "kv_heads": 4, "ffn_dim": 1408}
_SMALL = {"dim": 256, "layers": 6, "heads": 4, "kv_heads": 2, "ffn_dim": 704}
_TIED = {"dim": 512, "layers": 8, "heads": 8, "kv_heads": 4, "ffn_dim": 1408, "tie_embeddings": True}
_DEEP = {"dim": 384, "layers": 24, "heads": 6, "kv_heads": 2, "ffn_dim": 1024, "tie_embeddings": True}
_EXPERTS = {
    "dim": 384, "layers": 6, "heads": 6, "kv_heads": 2, "ffn_dim": 1024, "family": "dots1", "qk_norm": True,
    "experts": {
        "count": 8, "top_k": 2, "ffn_dim": 384, "shared": 1, "dense_layers": 1, "score": "sigmoid", "balance_rate": 1e-2
    },
}  # fmt: skip
_DEMO = {"dim": 192, "layers": 4, "heads": 6, "kv_heads": 2, "ffn_dim": 512, "tie_embeddings": True}  # preset tiny
_TINY = {"dim": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 128}
_TINY_EXPERTS = {**_TINY, "experts": {"count": 4, "top_k": 2, "ffn_dim": 64}, "family": "qwen3_moe", "qk_norm": True}

FULL = {
    one.name: one
    for one in (
        Trial("88m", _88M, 8192, 450, 64, 512, optimizers=("adamw", "muon")),
        Trial("34m", _34M, 8192, 300, 32, 512, points=10),
        Trial("small", _SMALL, 8192, 200, 32, 512, optimizers=("adamw", "muon")),
        Trial("tied", _TIED, 8192, 200, 32, 512, optimizers=("adamw", "muon")),
        Trial("deep", _DEEP, 8192, 200, 32, 512),
        Trial("experts", _EXPERTS, 8192, 200, 32, 512),
        Trial("demo", _DEMO, 8192, 160, 16, 256, points=8, lr=3e-3, optimizers=("adamw", "muon")),
    )
}
TINY = {
    one.name: one
    for one in (
        Trial("88m", _TINY, 512, 30, 16, 64, points=3, held_out=32, optimizers=("adamw", "muon")),
        Trial("tied", {**_TINY, "tie_embeddings": True}, 512, 30, 16, 64, points=3, held_out=32),
        Trial("experts", _TINY_EXPERTS, 512, 30, 16, 64, points=3, held_out=32),
    )
}

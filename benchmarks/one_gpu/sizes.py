"""The models that every system is asked for: Llama shapes."""

from __future__ import annotations

from dataclasses import dataclass

VOCAB = 128_256


@dataclass(frozen=True)
class Size:
    layers: int
    dim: int
    heads: int
    kv_heads: int
    ffn_dim: int
    batch: int
    seq: int = 4096
    ways: tuple[str, ...] = ("none",)  # of recomputing, the fastest first: a system takes the first that fits
    moments: str = "fp32"  # of AdamW; bf16: torchtitan then has all it holds in bf16, having no such choice
    few: int | None = None  # steps at most, where one takes many seconds; one more to warm up

    @property
    def tokens(self) -> int:
        return self.batch * self.seq


SIZES = {
    "tiny": Size(2, 256, 4, 2, 1024, 2, 256),  # to try the scripts
    "1b": Size(16, 2048, 32, 8, 8192, 8),
    "3b": Size(28, 3072, 24, 8, 8192, 4),
    "8b": Size(32, 4096, 32, 8, 14336, 2, moments="bf16"),
    "8b-4": Size(32, 4096, 32, 8, 14336, 4, moments="bf16", ways=("none", "selective")),
    "1b-32k": Size(16, 2048, 32, 8, 8192, 1, 32768),
    "1b-128k": Size(16, 2048, 32, 8, 8192, 1, 131072, ways=("selective", "attention", "full"), few=2),
}

"""torchtitan's own model, loss, compilation and order of a step, as its trainer runs them on one device: autocast,
fused AdamW, clipping. Its data loading and logging are left out (and with them what they import).

Ways of recomputing: `selective` is its "op", which keeps attention and every second product; `attention` the same, told
to keep no product; `full`. Arguments: size, way, steps."""

from __future__ import annotations

import importlib.util
import sys
import time
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch
from benchmarks.one_gpu.sizes import SIZES, VOCAB
from benchmarks.one_gpu.timing import batches, measure

if importlib.util.find_spec("datasets") is None:
    sys.modules |= {name: MagicMock() for name in ("datasets", "datasets.distributed")}

from torchtitan.components.loss import cross_entropy_loss  # type: ignore[import-not-found]
from torchtitan.config.job_config import ActivationCheckpoint  # type: ignore[import-not-found]
from torchtitan.distributed.activation_checkpoint import apply_ac  # type: ignore[import-not-found]
from torchtitan.distributed.utils import clip_grad_norm_  # type: ignore[import-not-found]
from torchtitan.models.llama3 import Transformer, TransformerModelArgs  # type: ignore[import-not-found]
from torchtitan.models.llama3.infra.parallelize import (  # type: ignore[import-not-found]
    _op_sac_save_list,
    apply_compile,
)

WAYS = {
    "selective": ActivationCheckpoint(mode="selective", selective_ac_option="op"),
    "attention": ActivationCheckpoint(
        mode="selective",
        selective_ac_option="op",
        per_op_sac_force_recompute_mm_shapes_by_fqns=["attention.w", "feed_forward.w"],
    ),
    "full": ActivationCheckpoint(mode="full"),
}


def main(name: str, way: str, steps: int) -> None:
    began, size = time.time(), SIZES[name]
    plain = int(2 * 4 * size.dim / 3)  # what it makes of dim by itself
    args = TransformerModelArgs(
        dim=size.dim,
        n_layers=size.layers,
        n_heads=size.heads,
        n_kv_heads=size.kv_heads,
        vocab_size=VOCAB,
        ffn_dim_multiplier=None if plain == size.ffn_dim else size.ffn_dim / plain,
        rope_theta=500_000,
        max_seq_len=size.seq,
    )
    with torch.device("meta"):
        model = Transformer(args)
    model.to_empty(device="cuda")
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cuda"))
    assert model.layers["0"].feed_forward.w1.weight.shape[0] == size.ffn_dim
    if way != "none":
        apply_ac(model, WAYS[way], model_compile_enabled=True, op_sac_save_list=_op_sac_save_list)
    if size.moments == "bf16":
        for parameter in model.parameters():  # not `model.to`: that takes the imaginary half of its rotations
            parameter.data = parameter.data.to(torch.bfloat16)
    apply_compile(model, SimpleNamespace(backend="inductor"))
    loss_of = torch.compile(cross_entropy_loss)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    ready = batches(size)

    def step(i: int) -> float:
        optimizer.zero_grad()
        tokens, targets = (t.to("cuda") for t in ready[i % len(ready)])
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(tokens)
            loss = loss_of(logits, targets) / size.tokens
        del logits
        loss.backward()
        clip_grad_norm_(list(model.parameters()), 1.0, foreach=True)
        optimizer.step()
        return float(loss.detach())

    measure("torchtitan bf16", size, step, began, steps)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))

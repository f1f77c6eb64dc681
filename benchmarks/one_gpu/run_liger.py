"""transformers with Liger's kernels, weights in float32 under autocast, fused AdamW. Arguments: size, way
of recomputing, steps."""

from __future__ import annotations

import sys
import time

import torch
from benchmarks.one_gpu.sizes import SIZES, VOCAB
from benchmarks.one_gpu.timing import batches, measure


def main(name: str, way: str, steps: int) -> None:
    began, size = time.time(), SIZES[name]
    from liger_kernel.transformers import apply_liger_kernel_to_llama  # type: ignore[import-not-found]
    from transformers import LlamaConfig, LlamaForCausalLM

    apply_liger_kernel_to_llama()
    config = LlamaConfig(
        hidden_size=size.dim,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.dim // size.heads,
        intermediate_size=size.ffn_dim,
        vocab_size=VOCAB,
        max_position_embeddings=size.seq,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
        use_cache=False,
    )
    with torch.device("cuda"):
        model = LlamaForCausalLM(config)
    if way == "full":
        model.gradient_checkpointing_enable()
    elif way != "none":
        sys.exit(f"transformers knows no way of recomputing that is called {way}")
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    ready = batches(size)

    def step(i: int) -> float:
        tokens, targets = (t.to("cuda") for t in ready[i % len(ready)])
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens, shift_labels=targets).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    measure("transformers + Liger", size, step, began, steps)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))

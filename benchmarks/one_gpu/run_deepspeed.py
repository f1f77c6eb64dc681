"""DeepSpeed driven by hand, with the optimizer in the CPU's memory. Arguments: a JSON object (benchmarks/offload.py).

`as shoal`: Shoal's decoder in float32 under torch's autocast, torch's fused AdamW, everything else as DeepSpeed has it.
`usual`: as its own pages say: transformers' Llama, DeepSpeed's bf16 and its DeepSpeedCPUAdam, which is compiled here.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


def main(asked: Mapping[str, Any]) -> None:
    began, device = time.time(), torch.device(asked["device"])
    os.environ.update(DS_ACCELERATOR=device.type, RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = str(20000 + os.getpid() % 20000)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    import deepspeed

    usual = asked["how"] == "usual"
    if not usual:
        deepspeed.ops.__compatible_ops__ = {}  # on a CPU it would compile one while it starts
    zero: dict[str, Any] = {"stage": asked["zero"], "offload_optimizer": {"device": "cpu"}}
    zero |= {"offload_param": {"device": "cpu"}} if asked["zero"] == 3 else {}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": asked["batch"],
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
        "steps_per_print": None,
    }
    model, loss_of = (_llama if usual else _decoder)(asked, device)
    if usual:
        about = {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
        config |= {"bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": about}}
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    else:
        config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
        groups = [
            {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), eps=1e-8, fused=True)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    generator = torch.Generator().manual_seed(0)
    begins, losses = [], []
    for i in range(asked["steps"]):
        begins.append(time.time())
        row = torch.randint(0, asked["data_vocab"], (asked["batch"], asked["seq"] + 1), generator=generator).to(device)
        loss = loss_of(engine, row[:, :-1].contiguous(), row[:, 1:].contiguous())
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
        if i == 0:
            print(f"first step after {time.time() - began:.0f} s", file=sys.stderr, flush=True)
    begins.append(time.time())
    print(json.dumps({"begins": begins, "losses": losses, "first_step_s": begins[1] - began}), flush=True)
    os._exit(0)  # what has been locked takes a while to be given back


Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def _decoder(asked: Mapping[str, Any], device: torch.device) -> tuple[nn.Module, Loss]:
    from shoal.model.decoder import Decoder
    from shoal.parallel import recompute
    from shoal.spec.model import Model
    from shoal.spec.shape import shape_of

    with torch.device("meta"):
        decoder = Decoder(shape_of(Model(**asked["model"])))
    recompute.apply(decoder, asked["recompute"])
    decoder.to_empty(device=device)
    with torch.no_grad():
        for p in decoder.parameters():
            p.normal_(std=0.02) if p.ndim >= 2 else p.fill_(1.0)

    def loss_of(engine: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            total: Tensor = engine(tokens, None, None, targets)
        return total / targets.numel()

    return decoder, loss_of


def _llama(asked: Mapping[str, Any], device: torch.device) -> tuple[nn.Module, Loss]:
    from transformers import LlamaConfig, LlamaForCausalLM

    m = asked["model"]
    config = LlamaConfig(
        hidden_size=m["dim"],
        num_hidden_layers=m["layers"],
        num_attention_heads=m["heads"],
        num_key_value_heads=m["kv_heads"],
        head_dim=m["dim"] // m["heads"],
        intermediate_size=m["ffn_dim"],
        vocab_size=m["vocab_size"],
        max_position_embeddings=asked["seq"],
        tie_word_embeddings=False,
        attn_implementation="sdpa",
        use_cache=False,
        dtype="bfloat16",
    )
    with device:
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    if asked["recompute"] == "full":
        model.gradient_checkpointing_enable()
    model.train()
    return model, lambda engine, tokens, targets: engine(input_ids=tokens, labels=tokens, shift_labels=targets).loss


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

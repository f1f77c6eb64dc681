import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig

batch_size, block_size, max_iters = 6, 32, 200
learning_rate = 6e-4


class Config:
    layers = 2
    width: int = 64


def get_batch(data):
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy(data[i : i + block_size].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + block_size].astype(np.int64)) for i in ix])
    return x, y


def loss_of(model, x, y):
    logits = model(input_ids=x).logits
    return F.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1))


def main():
    accelerator = Accelerator(mixed_precision="bf16")
    set_seed(3)
    cfg = Config()
    shape = dict(hidden_size=cfg.width, intermediate_size=cfg.width * 3, num_hidden_layers=cfg.layers)
    config = LlamaConfig(vocab_size=256, num_attention_heads=4, max_position_embeddings=64, **shape)
    model = AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=max_iters, eta_min=6e-5)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    data = np.memmap("train.bin", dtype=np.uint16, mode="r")
    for it in range(max_iters):
        loss = loss_of(model, *get_batch(data))
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


main()

"""A plain loop that fine-tunes a causal model, on prepared shards."""
import argparse

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, get_scheduler

import shoal.hf

WARMUP = 3
parser = argparse.ArgumentParser()
parser.add_argument("--model", default="base")
parser.add_argument("--data", default="shards")
parser.add_argument("-b", "--batch-size", type=int, default=4)
parser.add_argument("--accumulate", type=int, default=2)
parser.add_argument("--lr", type=float, default=3e-3)
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--schedule", default="cosine")
parser.add_argument("--warmup", type=int, default=WARMUP)
args = parser.parse_args()

def main():
    torch.manual_seed(11)
    data = shoal.hf.Data(args.data, seq_len=16, seed=5)
    model = AutoModelForCausalLM.from_pretrained(args.model)
    decayed = [p for n, p in model.named_parameters() if p.ndim > 1]
    others = [p for n, p in model.named_parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.2}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.98), eps=1e-7)
    schedule = get_scheduler(args.schedule, optimizer, num_warmup_steps=args.warmup, num_training_steps=args.steps)
    loader = DataLoader(data.train, batch_size=args.batch_size, collate_fn=data.collate)
    model.train()
    step = 0
    for number, batch in enumerate(loader):
        loss = model(**batch, use_cache=False).loss / args.accumulate  # a cache would join the documents of a row
        loss.backward()
        if (number + 1) % args.accumulate == 0:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            print("step", step, float(loss.detach()), float(norm), optimizer.param_groups[0]["lr"])
            schedule.step()
            optimizer.zero_grad()
            step += 1
            if step >= args.steps:
                break


main()

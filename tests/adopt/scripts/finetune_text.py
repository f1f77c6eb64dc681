import argparse
import logging
import math
import os

import torch
from datasets import load_dataset
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq, get_scheduler, set_seed

logger = logging.getLogger(__name__)


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="t5-small")
    parser.add_argument("--output_dir", default="out")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--grad_accum", type=int, default=4)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--resume_from", type=str, default=None)
    return parser.parse_args()


def evaluate(model, loader, device):
    model.eval()
    total, count = 0.0, 0
    for batch in loader:
        with torch.no_grad():
            total += model(**{k: v.to(device) for k, v in batch.items()}).loss.item()
        count += 1
    model.train()
    return math.exp(total / count)


def main():
    args = parse_args()
    set_seed(args.seed)
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForSeq2SeqLM.from_pretrained(args.model).to(device)
    raw = load_dataset("opus_books", "en-fr")["train"].train_test_split(0.1, seed=args.seed)
    encode = lambda rows: tokenizer([r["en"] for r in rows["translation"]], text_target=[r["fr"] for r in rows["translation"]], truncation=True)
    data = raw.map(encode, batched=True, remove_columns=["id", "translation"])
    collate = DataCollatorForSeq2Seq(tokenizer, model=model)
    train_loader = DataLoader(data["train"], shuffle=True, collate_fn=collate, batch_size=16)
    eval_loader = DataLoader(data["test"], collate_fn=collate, batch_size=16)
    no_decay = ["bias", "LayerNorm.weight"]
    groups = [
        {"params": [p for n, p in model.named_parameters() if not any(d in n for d in no_decay)], "weight_decay": 0.01},
        {"params": [p for n, p in model.named_parameters() if any(d in n for d in no_decay)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=5e-5)
    total = args.epochs * math.ceil(len(train_loader) / args.grad_accum)
    lr_scheduler = get_scheduler("linear", optimizer=optimizer, num_warmup_steps=0, num_training_steps=total)
    starting_epoch = 0
    if args.resume_from is not None:
        ckpt = torch.load(os.path.join(args.resume_from, "training_state.pt"), map_location=device)
        model.load_state_dict(ckpt["model"])
        optimizer.load_state_dict(ckpt["optimizer"])
        lr_scheduler.load_state_dict(ckpt["lr_scheduler"])
        torch.set_rng_state(ckpt["torch_rng"].cpu())
        starting_epoch = ckpt["epoch"] + 1
    bar = tqdm(range(total))
    model.train()
    for epoch in range(starting_epoch, args.epochs):
        for step, batch in enumerate(train_loader):
            batch = {k: v.to(device) for k, v in batch.items()}
            with torch.autocast(device.type, torch.bfloat16):
                outputs = model(**batch)
            loss = outputs.loss / args.grad_accum
            loss.backward()
            if step % args.grad_accum == 0 or step == len(train_loader) - 1:
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
                bar.update(1)
                bar.set_postfix(loss=loss.item())
        logger.info("epoch %d perplexity %s", epoch, evaluate(model, eval_loader, device))
        folder = os.path.join(args.output_dir, f"epoch_{epoch}")
        os.makedirs(folder, exist_ok=True)
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "lr_scheduler": lr_scheduler.state_dict(),
            "torch_rng": torch.get_rng_state(),
            "epoch": epoch,
        }
        torch.save(state, os.path.join(folder, "training_state.pt"))


if __name__ == "__main__":
    main()

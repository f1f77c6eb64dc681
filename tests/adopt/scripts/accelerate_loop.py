import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer, get_linear_schedule_with_warmup


def loaders(accelerator, tokenizer, batch_size):
    data = load_dataset("glue", "mrpc")
    with accelerator.main_process_first():
        data = data.map(lambda r: tokenizer(r["sentence1"], r["sentence2"], truncation=True), batched=True)

    def collate(rows):
        return tokenizer.pad(rows, return_tensors="pt")

    train = DataLoader(data["train"], shuffle=True, collate_fn=collate, batch_size=batch_size)
    val = DataLoader(data["validation"], collate_fn=collate, batch_size=batch_size)
    return train, val


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mixed_precision", default="bf16")
    parser.add_argument("--resume_from_checkpoint")
    args = parser.parse_args()
    accelerator = Accelerator(mixed_precision=args.mixed_precision, gradient_accumulation_steps=4)
    set_seed(42)
    tokenizer = AutoTokenizer.from_pretrained("bert-base-cased")
    train, val = loaders(accelerator, tokenizer, 16)
    model = AutoModelForSequenceClassification.from_pretrained("bert-base-cased")
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    scheduler = get_linear_schedule_with_warmup(optimizer, 100, 3 * len(train))
    model, optimizer, train, val, scheduler = accelerator.prepare(model, optimizer, train, val, scheduler)
    start = 0
    if args.resume_from_checkpoint:
        accelerator.load_state(args.resume_from_checkpoint)
        start = int(args.resume_from_checkpoint.rsplit("_", 1)[1]) + 1
    for epoch in range(start, 3):
        model.train()
        for batch in train:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        model.eval()
        right = 0
        for batch in val:
            with torch.no_grad():
                predicted = model(**batch).logits.argmax(-1)
            predicted, labels = accelerator.gather_for_metrics((predicted, batch["labels"]))
            right += (predicted == labels).sum().item()
        accelerator.print(f"epoch {epoch}: {right}")
        accelerator.save_state(f"epoch_{epoch}")


if __name__ == "__main__":
    main()

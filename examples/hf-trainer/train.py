"""The Trainer of transformers on Shoal's data and order. Kill it, go on with other sizes: each window is read once.

Prepare the data first: `shoal data prepare examples/text/moby-dick.txt --separator '\\n\\n\\n' --out data`.
"""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import shoal.hf

parser = argparse.ArgumentParser()
parser.add_argument("--data", default="data")
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--batch", type=int, default=8, help="windows a process computes at once")
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--out", default="out")
parser.add_argument("--resume_from_checkpoint")
options = parser.parse_args()

data = shoal.hf.Data(options.data, seq_len=128, seed=7)
torch.manual_seed(0)
shape = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=data.vocab_size, max_position_embeddings=129, **shape))
args = TrainingArguments(
    options.out,
    max_steps=options.steps,
    per_device_train_batch_size=options.batch,
    gradient_accumulation_steps=options.accumulate,
    learning_rate=3e-3,
    lr_scheduler_type="constant",
    logging_steps=10,
    save_steps=20,
    report_to="none",
    use_cpu=not torch.cuda.is_available(),  # else processes on CPUs would not know of each other
    disable_tqdm=True,
    accelerator_config={"dispatch_batches": False},  # each process reads its own windows
)
trainer = Trainer(model, args, train_dataset=data.train, data_collator=data.collate, callbacks=[data.order])
trainer.train(resume_from_checkpoint=options.resume_from_checkpoint)

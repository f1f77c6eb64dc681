"""The Trainer of transformers on prepared shards, with dataclasses for its options."""
from dataclasses import dataclass, field

from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments

import shoal.hf


@dataclass
class Args:
    model: str = field(default="base")
    data: str = "shards"


if __name__ == "__main__":
    (args,) = HfArgumentParser((Args,)).parse_args_into_dataclasses()
    data = shoal.hf.Data(args.data, seq_len=16, seed=5)
    training = TrainingArguments(
        "out",
        max_steps=8,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        weight_decay=0.1,
        adam_beta2=0.95,
        max_grad_norm=0.3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        accelerator_config={"dispatch_batches": False},
    )
    model = AutoModelForCausalLM.from_pretrained(args.model)
    trainer = Trainer(
        model, training, train_dataset=data.train, data_collator=data.collate, callbacks=[data.order]
    )
    trainer.train()
    for row in trainer.state.log_history:
        if "grad_norm" in row:
            print("step", row["step"] - 1, row["loss"], row["grad_norm"], row["learning_rate"])

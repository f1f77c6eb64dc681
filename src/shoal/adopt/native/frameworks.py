"""What the trainers of transformers and TRL do where a script says nothing: their own defaults, by their own names.

A test compares the first table with the transformers that is installed. TRL is not among Shoal's packages: its names
were read in trl 1.16.
"""

from __future__ import annotations

from typing import Any

TRANSFORMERS: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "num_train_epochs": 3.0,
    "max_steps": -1,
    "learning_rate": 5e-5,
    "lr_scheduler_type": "linear",
    "lr_scheduler_kwargs": None,
    "warmup_steps": 0,
    "optim": "adamw_torch_fused",
    "optim_args": None,
    "optim_target_modules": None,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "gradient_accumulation_steps": 1,
    "max_grad_norm": 1.0,
    "label_smoothing_factor": 0.0,
    "bf16": False,
    "fp16": False,
    "gradient_checkpointing": False,
    "neftune_noise_alpha": None,
    "save_strategy": "steps",
    "save_steps": 500,
    "seed": 42,
    "data_seed": None,
    "auto_find_batch_size": False,
}
TRL: dict[str, Any] = TRANSFORMERS | {
    "learning_rate": 2e-5,
    "gradient_checkpointing": True,
    "bf16": None,  # true where fp16 is not
    "max_length": 1024,
    "packing": False,
    "dataset_text_field": "text",
    "completion_only_loss": None,
    "assistant_only_loss": False,
    "loss_type": "nll",
}
# Names that transformers 5 has no more.
OLDER: dict[str, Any] = {"warmup_ratio": None, "max_seq_length": None}
# By the full name of what makes the settings.
SETTINGS: dict[str, dict[str, Any]] = {
    "transformers.TrainingArguments": TRANSFORMERS | OLDER,
    "transformers.training_args.TrainingArguments": TRANSFORMERS | OLDER,
    "trl.SFTConfig": TRL | OLDER,
    "trl.trainer.SFTConfig": TRL | OLDER,
    "trl.ModelConfig": {"model_name_or_path": None, "use_peft": False, "load_in_4bit": False, "load_in_8bit": False},
    "trl.ScriptArguments": {"dataset_name": None, "dataset_config": None, "dataset_train_split": "train"},
}
FIRST = {"transformers": "output_dir", "trl": "output_dir"}  # given without a name


def short(full: str) -> str:
    return full.rpartition(".")[2]

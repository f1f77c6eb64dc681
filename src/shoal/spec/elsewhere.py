"""What other trainers call our names, and what they have that Shoal has not: the first things a newcomer types.

No key here is a name of the run file or a verb: a test holds that, so whoever builds one of them removes its answer.
"""

from __future__ import annotations

# Names of Hugging Face's Trainer and TRL, torchtitan, Lightning, Megatron, nanochat and litgpt, and ours.
CALLED = {
    # how long, how much at once
    "max_steps": "train.steps",
    "num_steps": "train.steps",
    "total_steps": "train.steps",
    "train_steps": "train.steps",
    "train_iters": "train.steps",
    "max_iters": "train.steps",
    "num_iterations": "train.steps",
    "iterations": "train.steps",
    "num_train_epochs": "train.epochs",
    "num_epochs": "train.epochs",
    "max_epochs": "train.epochs",
    "max_tokens": "train.tokens",
    "train_tokens": "train.tokens",
    "total_tokens": "train.tokens",
    "train_samples": "train.steps, of train.batch samples each",
    "batch_size": "train.batch",
    "global_batch_size": "train.batch",
    "total_batch_size": "train.batch, in windows",
    "train_batch_size": "train.batch, over all processes",
    "micro_batch_size": "mesh.micro_batch",
    "local_batch_size": "mesh.micro_batch",
    "device_batch_size": "mesh.micro_batch",
    "per_device_train_batch_size": "mesh.micro_batch; train.batch is over all processes",
    "per_device_eval_batch_size": "mesh.micro_batch",
    "gradient_accumulation_steps": "mesh.micro_batch; what is left of train.batch is accumulated",
    "accumulate_grad_batches": "mesh.micro_batch; what is left of train.batch is accumulated",
    "seq_length": "data.seq_len",
    "sequence_length": "data.seq_len",
    "context_length": "data.seq_len",
    "block_size": "data.seq_len",
    "max_length": "data.seq_len",
    "max_seq_length": "data.seq_len",
    "sample_packing": "data.packing",
    "packing_strategy": "data.packing",
    # optimizer and schedule
    "learning_rate": "train.optimizer.lr",
    "max_lr": "train.optimizer.lr",
    "base_lr": "train.optimizer.lr",
    "embedding_lr": "train.optimizer.lr, with train.optimizer.name muon",
    "matrix_lr": "train.optimizer.muon_lr",
    "min_lr": "train.schedule.min_ratio, a share of train.optimizer.lr",
    "min_lr_factor": "train.schedule.min_ratio",
    "final_lr_frac": "train.schedule.min_ratio",
    "adam_beta1": "train.optimizer.betas",
    "adam_beta2": "train.optimizer.betas",
    "beta1": "train.optimizer.betas",
    "beta2": "train.optimizer.betas",
    "adam_epsilon": "train.optimizer.eps",
    "max_grad_norm": "train.clip",
    "max_norm": "train.clip",
    "grad_clip": "train.clip",
    "clip_grad": "train.clip",
    "gradient_clip_val": "train.clip",
    "lr_scheduler": "train.schedule",
    "lr_scheduler_type": "train.schedule.name",
    "lr_decay_style": "train.schedule.name",
    "warmup": "train.schedule.warmup_steps, a number of steps or a share such as 5%",
    "warmup_ratio": "train.schedule.warmup_steps, a number of steps or a share such as 5%",
    "warmup_iters": "train.schedule.warmup_steps",
    "lr_warmup_steps": "train.schedule.warmup_steps",
    "lr_warmup_iters": "train.schedule.warmup_steps",
    "lr_warmup_fraction": "train.schedule.warmup_steps, a number of steps or a share such as 5%",
    "decay": "train.schedule.decay_steps, or train.optimizer.weight_decay",
    "decay_ratio": "train.schedule.decay_steps, a number of steps or a share such as 20%",
    "warmdown_ratio": "train.schedule.decay_steps, a number of steps or a share such as 20%",
    "lr_decay_iters": "train.schedule.decay_steps",
    "optim": "train.optimizer.name",
    # the model
    "model_name_or_path": "model.weights, the folder of a Hugging Face model, or model.preset",
    "pretrained_model_name_or_path": "model.weights, the folder of a Hugging Face model",
    "model_name": "model.preset, or model.weights for the folder of a Hugging Face model",
    "flavor": "model.preset",
    "depth": "model.layers",
    "hidden_size": "model.dim",
    "hidden_dim": "model.dim",
    "d_model": "model.dim",
    "n_embd": "model.dim",
    "n_layer": "model.layers",
    "n_layers": "model.layers",
    "num_layers": "model.layers",
    "num_hidden_layers": "model.layers",
    "n_head": "model.heads",
    "n_heads": "model.heads",
    "num_heads": "model.heads",
    "num_attention_heads": "model.heads",
    "n_kv_heads": "model.kv_heads",
    "num_key_value_heads": "model.kv_heads",
    "num_query_groups": "model.kv_heads",
    "intermediate_size": "model.ffn_dim",
    "ffn_hidden_size": "model.ffn_dim",
    "max_position_embeddings": "model.max_seq_len",
    "rotary_base": "model.rope_theta",
    "rms_norm_eps": "model.norm_eps",
    "norm_epsilon": "model.norm_eps",
    "init_method_std": "model.init_std",
    "initializer_range": "model.init_std",
    "initializer": "model.init",
    "tie_word_embeddings": "model.tie_embeddings",
    "untie_embeddings_and_output_weights": "model.tie_embeddings",
    "num_experts": "model.experts.count",
    "num_local_experts": "model.experts.count",
    "num_experts_per_tok": "model.experts.top_k",
    "moe_router_topk": "model.experts.top_k",
    "moe_ffn_hidden_size": "model.experts.ffn_dim",
    # data
    "dataset": "data.train, a folder that `shoal data prepare` has made",
    "dataset_name": "data.train, a folder that `shoal data prepare` has made",
    "dataset_path": "data.train, a folder that `shoal data prepare` has made",
    "data_path": "data.train, a folder that `shoal data prepare` has made",
    "train_file": "data.train, a folder that `shoal data prepare` has made",
    "train_data": "data.train",
    "validation_file": "data.eval, a folder that `shoal data prepare --eval-fraction 0.05` has made",
    "val_data": "data.eval",
    # checkpoints and evaluation
    "save_steps": "checkpoint.every",
    "save_every": "checkpoint.every",
    "save_interval": "checkpoint.every",
    "save_freq": "checkpoint.every",
    "save_strategy": "checkpoint.every",
    "every_n_train_steps": "checkpoint.every",
    "checkpoint_interval": "checkpoint.every",
    "ckpt_every": "checkpoint.every",
    "ckpt_interval": "checkpoint.every",
    "interval": "checkpoint.every, or eval.every",
    "save_total_limit": "checkpoint.keep",
    "keep_latest_k": "checkpoint.keep",
    "max_to_keep": "checkpoint.keep",
    "save_top_k": "checkpoint.keep_best",
    "load_best_model_at_end": "checkpoint.keep_best",
    "async_save": "checkpoint.background",
    "async_mode": "checkpoint.background",
    "eval_steps": "eval.every",
    "eval_interval": "eval.every",
    "eval_strategy": "eval.every",
    "evaluation_strategy": "eval.every",
    "val_check_interval": "eval.every",
    "val_interval": "eval.every",
    "validation": "eval, with data.eval",
    "evaluation": "eval, with data.eval",
    "eval_iters": "eval.windows",
    "limit_val_batches": "eval.windows",
    "eval_tokens": "eval.windows",
    # tracking
    "project": "track.experiment",
    "wandb_project": "track.experiment",
    "run_name": "name",
    "experiment_name": "track.experiment",
    "report_to": "track.mlflow, track.wandb or track.tensorboard",
    "logger": "track.mlflow, track.wandb or track.tensorboard",
    "enable_wandb": "track.wandb",
    "enable_tensorboard": "track.tensorboard",
    "random_seed": "seed",
    # layout, machines, failures
    "dp": "mesh.dp_shard, or mesh.dp_replicate for whole copies",
    "fsdp": "mesh.dp_shard",
    "ddp": "mesh.dp_replicate",
    "strategy": "mesh; `auto` finds the fastest layout that fits",
    "parallelism": "mesh",
    "data_parallel_shard_degree": "mesh.dp_shard",
    "data_parallel_replicate_degree": "mesh.dp_replicate",
    "use_distributed_optimizer": "mesh.dp_shard",
    "tensor_parallel": "mesh.tp",
    "tensor_parallel_size": "mesh.tp",
    "tensor_parallel_degree": "mesh.tp",
    "tensor_model_parallel_size": "mesh.tp",
    "sequence_parallel": "mesh.tp, which has it",
    "pipeline_parallel": "mesh.pp",
    "pipeline_parallel_size": "mesh.pp",
    "pipeline_parallel_degree": "mesh.pp",
    "pipeline_parallel_schedule": "mesh.schedule",
    "pipeline_model_parallel_size": "mesh.pp",
    "context_parallel": "mesh.cp",
    "context_parallel_size": "mesh.cp",
    "context_parallel_degree": "mesh.cp",
    "expert_parallel": "mesh.ep",
    "expert_parallel_size": "mesh.ep",
    "expert_parallel_degree": "mesh.ep",
    "expert_model_parallel_size": "mesh.ep",
    "activation_checkpoint": "mesh.recompute",
    "activation_checkpointing": "mesh.recompute",
    "gradient_checkpointing": "mesh.recompute",
    "recompute_granularity": "mesh.recompute",
    "recompute_activations": "mesh.recompute",
    "nproc_per_node": "resources.processes",
    "accelerator": "resources.device",
    "num_nodes": "launch.nodes",
    "nnodes": "launch.nodes",
    "gpus_per_node": "launch.gpus",
    "num_gpus": "launch.gpus, or resources.processes on this machine",
    "partition": "launch.queue",
    "walltime": "launch.time_limit",
    "retries": "guard.restarts, or launch.requeues for those of the scheduler",
    "max_retries": "guard.restarts, or launch.requeues for those of the scheduler",
    "max_restarts": "guard.restarts",
    "mixed_precision": "train.precision",
    "dtype": "train.precision",
    "torch_dtype": "train.precision",
    "bf16": "train.precision: bf16",
    "fp8": "train.precision: fp8",
    "float8": "train.precision: fp8",
    "torch_compile": "train.compile",
}

_ADAPTERS = "Shoal has no LoRA or other adapters yet: it trains all weights; a small train.optimizer.lr forgets less"
_PREFERENCES = (
    "Shoal has no preference or reinforcement learning yet: it pre-trains and fine-tunes; `shoal checkpoint export RUN "
    "FOLDER` writes what TRL opens"
)
_SERVING = (
    "Shoal has no server for models yet: `shoal sample RUN` generates text here, and `shoal checkpoint export RUN "
    "FOLDER` writes what vLLM and transformers open"
)
_QUANTIZATION = (
    "Shoal has no quantization of weights yet: `train.precision: fp8` computes in 8 bits, and `shoal checkpoint export "
    "RUN FOLDER` writes what other tools can quantize"
)
_HARNESS = (
    "Shoal has no evaluation on benchmarks yet: data.eval measures the loss on held-out text, and `shoal checkpoint "
    "export RUN FOLDER` writes what lm-evaluation-harness opens"
)
_DEEPSPEED = "Shoal has no DeepSpeed yet: mesh.dp_shard shards weights, gradients and optimizer, as ZeRO 3 does"
_UI = "Shoal has no page in a browser yet: `shoal ps`, `shoal report RUN`, or the page of your tracker (track.mlflow)"
_ALL_STEPS = "every step is recorded in the run's journal, so there is nothing to set"
_DROPOUT = "Shoal has no dropout: the models it trains are published without it"
_WORKERS = "Shoal reads data ahead by itself, so there is nothing to set"
_TOKENIZER = "the tokenizer belongs to the data: `shoal data prepare TEXT… --tokenizer FILE --out FOLDER` applies it"
_MARKS = "documents start and end as their data was prepared: `shoal data prepare TEXT… --start TOKEN --eos TOKEN`"
_OWN_CODE = "Shoal cannot run code of your own inside a training yet"

# What Shoal lacks, or does by itself: said so. A key may be a part of a longer name (`lora` of `lora_alpha`).
ANSWERED = {
    **dict.fromkeys(("lora", "qlora", "peft", "adapter", "adapters"), _ADAPTERS),
    **dict.fromkeys(("dpo", "ppo", "grpo", "orpo", "kto", "rlhf", "rl", "reward", "posttrain"), _PREFERENCES),
    **dict.fromkeys(("serve", "server", "serving", "vllm", "endpoint", "deploy", "deployment", "infer"), _SERVING),
    **dict.fromkeys(("quantization", "quantize", "quant", "4bit", "8bit", "gptq", "awq", "gguf"), _QUANTIZATION),
    **dict.fromkeys(("harness", "mmlu", "benchmarks", "lm_eval", "evaluate", "eval_tasks", "core_metric"), _HARNESS),
    **dict.fromkeys(("deepspeed", "zero", "zero3"), _DEEPSPEED),
    **dict.fromkeys(("ui", "dashboard", "web"), _UI),
    **dict.fromkeys(("logging_steps", "log_every_n_steps", "log_interval", "log_freq", "log_every"), _ALL_STEPS),
    **dict.fromkeys(("dropout", "attention_dropout", "hidden_dropout"), _DROPOUT),
    **dict.fromkeys(("num_workers", "dataloader_num_workers", "prefetch", "dataloader_pin_memory"), _WORKERS),
    **dict.fromkeys(("callbacks", "callback", "hooks"), _OWN_CODE),
    "fp16": "Shoal has no fp16: take `train.precision: bf16`, which needs no loss scaling",
    "tf32": "Shoal chooses this by itself; train.precision says in which type is computed",
    "ema": "Shoal keeps no moving average of the weights yet",
    "distillation": "Shoal has no distillation yet",
    "distill": "Shoal has no distillation yet",
    "label_smoothing": "Shoal has no label smoothing",
    "patience": "Shoal stops no run early by its loss; `shoal sweep --stop-early` stops the worse half of many",
    "early_stopping": "Shoal stops no run early by its loss; `shoal sweep --stop-early` stops the worse half of many",
    **dict.fromkeys(("tokenizer", "tokenizer_path", "tokenizer_model"), _TOKENIZER),
    **dict.fromkeys(("add_bos_token", "prepend_bos", "bos_token", "add_eos_token", "eos_token"), _MARKS),
    "shuffle": "Shoal always shuffles, in an order that `seed` gives",
    "streaming": "Shoal reads prepared shards, also from s3://…, without copying all of them first",
    "output_dir": "a run is kept in runs/NAME of the workspace; --workspace names another folder",
    "dump_folder": "a run is kept in runs/NAME of the workspace; --workspace names another folder",
    "default_root_dir": "a run is kept in runs/NAME of the workspace; --workspace names another folder",
    "logging_dir": "a run is kept in runs/NAME of the workspace; --workspace names another folder",
    "overwrite_output_dir": "`shoal train --fresh` sets an existing run aside and starts anew",
    "resume_from_checkpoint": "a run goes on by itself from its newest checkpoint: `shoal resume NAME`",
    "ckpt_path": "a run goes on by itself from its newest checkpoint: `shoal resume NAME`",
    "do_train": "`shoal train` trains; there is nothing to set",
    "do_eval": "with data.eval it is evaluated at the end, and every eval.every steps; there is nothing else to set",
    "push_to_hub": "Shoal uploads no model: `shoal checkpoint export RUN FOLDER`, then `hf upload`",
    "hub_model_id": "Shoal uploads no model: `shoal checkpoint export RUN FOLDER`, then `hf upload`",
    "attn_implementation": "Shoal takes the fastest attention that the device has; there is nothing to set",
    "flash_attention": "Shoal takes the fastest attention that the device has; there is nothing to set",
    "use_flash_attn": "Shoal takes the fastest attention that the device has; there is nothing to set",
    "trust_remote_code": "Shoal runs no code of a model's folder",
    "login": "Shoal has no accounts: trackers and stores read their keys from the environment",
    "install": "extras are installed with pip: `pip install shoal[mlflow]`",
}  # fmt: skip

_CUDA = "and torch calls AMD's GPUs `cuda`, as Shoal does: write `cuda`, or `auto`"
# Values that other trainers have for a key of ours: what to write, or that Shoal lacks it.
VALUES = {
    "resources.device": {
        **dict.fromkeys(("rocm", "hip", "amd"), _CUDA),
        **dict.fromkeys(("gpu", "nvidia"), "which Shoal calls `cuda`: write `cuda`, or `auto`"),
        "mps": "and Shoal does not train on Apple's GPUs yet: write `cpu`",
        "xpu": "and Shoal does not train on Intel's GPUs yet: write `cpu`",
        **dict.fromkeys(("tpu", "xla", "hpu", "npu"), "and Shoal trains on GPUs of NVIDIA and AMD and on CPUs alone"),
    },
    "data.packing": {
        **dict.fromkeys(("bfd", "best_fit", "ffd"), "which Shoal calls `best-fit`: write that"),
        **dict.fromkeys(("wrapped", "concat", "none"), "which Shoal calls `chop`: write that"),
    },
}  # fmt: skip

# Verbs of other programs, and ours.
VERBS_CALLED = {
    "fit": "train",
    "run": "train",
    "start": "train",
    "pretrain": "init pretrain",
    "finetune": "init finetune",
    "new": "init",
    "create": "init",
    "template": "init",
    "config": "show",
    "validate": "show",
    "check": "show",
    "presets": "show --presets",
    "prepare": "data prepare",
    "tokenize": "data prepare",
    "tokenizer": "data tokenizer",
    "estimate": "plan",
    "predict": "plan",
    "compare": "report",
    "submit": "launch",
    "sbatch": "launch",
    "status": "ps",
    "list": "ps",
    "ls": "ps",
    "jobs": "ps",
    "runs": "ps",
    "tail": "logs",
    "log": "logs",
    "kill": "stop",
    "cancel": "stop",
    "restart": "resume",
    "continue": "resume",
    "tune": "sweep",
    "hpo": "sweep",
    "search": "sweep",
    "grid": "sweep",
    "benchmark": "bench",
    "trace": "profile",
    "chaos": "drill",
    "generate": "sample",
    "chat": "sample",
    "inference": "sample",
    "complete": "sample",
    "export": "checkpoint export",
    "import": "checkpoint import",
    "checkpoints": "checkpoint ls",
    "join": "swarm join",
    "invite": "swarm invite",
    "peer": "swarm join",
    "sync": "track",
    "mlflow": "track",
    "version": "--version",
}
VERBS_ANSWERED = {
    **{word: ANSWERED[word] for word in ("serve", "server", "deploy", "quantize", "lora", "dpo", "rlhf", "distill")},
    **{word: ANSWERED[word] for word in ("ui", "dashboard", "login", "install")},
    **dict.fromkeys(("eval", "evaluate"), _HARNESS),
    "delete": "delete the folder runs/NAME; `shoal checkpoint rm` deletes single checkpoints",
    "rm": "delete the folder runs/NAME; `shoal checkpoint rm` deletes single checkpoints",
    "merge": "Shoal merges no models yet",
    "convert": "`shoal checkpoint export` and `import` convert from and to other formats",
}
# Of the keys of ANSWERED, the words that mean the same inside a longer name.
_PARTS = frozenset((
    "lora", "qlora", "peft", "dpo", "ppo", "grpo", "rlhf", "vllm", "quantization", "4bit", "8bit", "gptq", "awq",
    "deepspeed", "zero3", "mmlu", "dropout", "ema", "distillation", "harness",
))  # fmt: skip


def answered(name: str) -> str | None:
    """What to say of a name for something that Shoal lacks or does by itself; also where it is part of a longer one."""
    plain = name.lower().replace("-", "_")
    if plain in ANSWERED:
        return ANSWERED[plain]
    return next((ANSWERED[part] for part in plain.split("_") if part in _PARTS), None)


def answered_value(key: str, value: object) -> str | None:
    """What to say of a value that another trainer has for this key."""
    return VALUES.get(key, {}).get(value.lower()) if isinstance(value, str) else None

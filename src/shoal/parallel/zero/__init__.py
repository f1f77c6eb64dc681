"""DeepSpeed's ZeRO in the place of FSDP2 and DDP: the same step, and the same checkpoints."""

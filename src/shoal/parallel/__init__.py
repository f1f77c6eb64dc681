"""How a plain model is laid over processes: joining the group, DDP, FSDP2, HSDP, precision."""

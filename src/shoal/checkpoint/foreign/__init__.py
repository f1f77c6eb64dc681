"""In and out: checkpoints of others become ours, ours become Hugging Face folders. docs/decisions/020 says why."""

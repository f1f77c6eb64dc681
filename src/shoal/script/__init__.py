"""Somebody's training script: what is known of its file, its checkpoints, and the probe inside its processes."""

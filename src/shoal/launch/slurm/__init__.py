"""Slurm: one batch script a job, one agent a node, and at the end of each start a verdict on the next."""

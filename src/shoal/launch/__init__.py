"""Local, Slurm, Kubernetes, Ray: render, submit, watch, stop. Each scheduler starts one agent a node; see agent.py."""

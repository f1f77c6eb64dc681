"""Kubernetes: an Indexed Job with a headless Service; a JobSet where the cluster has it; Kueue when asked."""

"""Trainers beside each other on the same GPUs, taking turns: see benchmarks/beside_titan.py."""

"""Shoal: one run file that plans, launches, trains, survives, tracks and evaluates a language model."""

__version__ = "0.1.0"

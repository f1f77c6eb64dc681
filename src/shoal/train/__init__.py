"""The loop and what it stands on: decisions, optimizers, schedules, evaluation, the worker process."""

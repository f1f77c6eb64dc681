"""A few steps of a run's own trainer, traced and explained: where the time goes, and what to fix next."""

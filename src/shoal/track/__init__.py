"""The journal and the run directory, and the mirrors that copy the journal to MLflow, W&B and TensorBoard. No torch."""

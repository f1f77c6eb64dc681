"""`torchrun -m shoal.train RUN.yaml`, and what the supervisor starts: `python -m shoal.train --worker RUN_DIR`."""

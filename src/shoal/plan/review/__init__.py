"""Says what in a run file will hurt at scale, before anything runs."""

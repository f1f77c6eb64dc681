"""A run on disk: its directory, its journal, the pulse of each worker, its lock."""

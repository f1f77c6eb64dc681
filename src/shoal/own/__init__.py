"""Own code in a run: found, carried along, imported by those who train, and never by anybody else."""

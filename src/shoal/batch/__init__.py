"""A batch: one command over many units, each of which is done once, by as many nodes as there are."""

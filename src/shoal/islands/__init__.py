"""Islands: copies of a run that may die, hang or join at any time, while the others go on. docs/decisions/022."""

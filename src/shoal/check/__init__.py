"""A run, trained in several ways for a few steps, and whether all of them give the same. Never imports torch."""

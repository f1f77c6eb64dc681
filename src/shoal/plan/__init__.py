"""Predicts what a run needs before anything is started. No torch."""

"""Watches over the workers: starts them, names what killed them, restarts or gives up. Never imports torch."""

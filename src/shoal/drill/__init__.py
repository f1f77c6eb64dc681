"""Drills: a real run is broken on purpose, and what that cost is read from its journal. Never imports torch."""

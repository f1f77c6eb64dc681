"""Tests mirror src; `tests.ranks` runs a function on several ranks."""

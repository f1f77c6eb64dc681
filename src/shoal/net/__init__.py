"""Peers that reach each other: encrypted connections through NATs, and what links can carry. docs/decisions/037."""

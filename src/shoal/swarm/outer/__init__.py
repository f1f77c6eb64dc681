"""The outer step: the weights that all peers hold alike, and how parts change them. docs/decisions/038."""

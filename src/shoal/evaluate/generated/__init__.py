"""Tasks that Shoal makes by itself, as many items as are asked for: a model can be asked where there is no data."""

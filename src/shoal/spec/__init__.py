"""What a run is: the typed run file, presets, overrides, JSON schema. Imports nothing of ours but errors."""

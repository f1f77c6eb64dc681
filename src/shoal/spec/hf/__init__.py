"""What a Hugging Face folder says of a model: its config.json, read and written."""

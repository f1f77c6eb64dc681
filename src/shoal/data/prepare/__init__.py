"""Text to token shards: inputs, readers, units of work, workers; and tokenizers that are trained."""

"""Text out of a model: the trainer's own decoder with a cache of keys and values, several requests at a time."""

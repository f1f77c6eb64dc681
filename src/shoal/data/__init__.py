"""Text into token shards, shards into windows, windows into batches in an order that is a pure function."""

"""The rules, by topic. Each reads a `Training` and yields findings; in doubt it yields none."""

"""The memory tier: what the nodes of a run hold in RAM, for the next start of it. docs/decisions/021 says why."""

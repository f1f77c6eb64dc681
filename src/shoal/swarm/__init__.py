"""A swarm: peers without a common store that train one model by rounds. docs/decisions/035."""

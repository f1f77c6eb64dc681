"""A `Run` as a run file."""

from __future__ import annotations

from shoal import __version__
from shoal.spec.drivers import sections
from shoal.spec.run import Run
from shoal.spec.yaml_text import dump_yaml


def dump(run: Run) -> str:
    """YAML with every value explicit, presets written out; `load` of it gives an equal `Run`."""
    return (
        f"# Resolved by Shoal {__version__}: every value stands here, so `shoal train` of this file is the same run.\n"
        + dump_yaml(sections(run))
    )

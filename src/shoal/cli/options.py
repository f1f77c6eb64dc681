"""Options that several verbs take, in the same words."""

from __future__ import annotations

import argparse

BACKENDS = ("local", "slurm", "kubernetes", "ray")  # of --on


def add_workspace(parser: argparse.ArgumentParser, holds: str = "runs/") -> None:
    parser.add_argument(
        "--workspace", metavar="DIR", help=f"the folder that holds {holds} (default: $SHOAL_WORKSPACE or here)"
    )

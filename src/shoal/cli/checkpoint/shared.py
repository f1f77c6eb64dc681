"""What the verbs of `shoal checkpoint` share: finding what is meant, a bar, a note."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shoal.checkpoint.locate import Place, place_of
from shoal.cli.options import no_script
from shoal.errors import CheckpointError
from shoal.journal.rundir import workspace


def place(args: argparse.Namespace, text: str) -> Place:
    """Where the checkpoints are that a person means; there must be some."""
    found = place_of(text, workspace(args.workspace))
    run_dir = found.run_dir
    if run_dir is not None and (run_dir.is_script or run_dir.is_batch) and not found.listed():  # a script may attach
        no_script(run_dir)
    for words in found.notes:
        note(words)
    return found


def none_yet(of: Place) -> CheckpointError:
    where = " or ".join(tier.store.where for tier in of.tiers)
    return CheckpointError(f"{of.label} has no checkpoint yet (looked in {where}).")


def note(words: str) -> None:
    print(f"shoal: {words.rstrip('.')}.", file=sys.stderr)


def passed_over(words: str) -> None:
    note(f"passed over {words}")


@contextmanager
def progress(label: str, total_bytes: int, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """A bar with an ETA on a terminal; nothing elsewhere."""
    if quiet or not sys.stderr.isatty():
        yield lambda n: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total_bytes)
        yield lambda n: bar.advance(task, n)

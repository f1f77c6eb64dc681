"""Data sources of somebody's own for these tests: one that gives the windows of prepared data, one that walks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shoal.journal.rundir import RunDir
from shoal.own.carry import carry
from shoal.spec.run import Run
from tests.train.tiny import make_run

CODE = """
import numpy as np

from shoal.data.shards import TokenShards
from shoal.data.windows import PADDING, Windows


class Prepared:
    def __init__(self, run):
        shards = TokenShards.open(run.own.settings["at"])
        self._windows = Windows([shards], run.data.seq_len, True, "pairs")
        self.fingerprint = run.own.settings.get("fingerprint", shards.index.fingerprint)

    def __len__(self):
        return self._windows.sizes[0]

    def __getitem__(self, i):
        batch = self._windows.batch([0], [i])
        documents = batch.documents[0].astype(np.int64)
        documents[documents == PADDING] = -1
        return {
            "tokens": batch.tokens[0],
            "targets": batch.targets[0],
            "documents": documents,
            "positions": batch.positions[0],
        }


class Walk:
    fingerprint = "a walk"
    vocab_size = 96

    def __init__(self, run):
        self._length = run.data.seq_len
        self._bad = run.own.settings.get("bad")

    def __len__(self):
        return 40

    def __getitem__(self, i):
        if i == self._bad:
            raise KeyError(f"no page {i}")  # line 43
        return (np.arange(self._length + 1) * (i + 1)) % 96
"""
RAISES_AT = CODE.splitlines().index('            raise KeyError(f"no page {i}")  # line 43') + 1


def own_run(workspace: Path, source: str = "Prepared", **changes: Any) -> Run:
    """A run whose data is a source of its own, with the copy of its code in its directory."""
    folder = workspace / "code"
    folder.mkdir(exist_ok=True)
    (folder / "mine.py").write_text(CODE)
    own = {"own.data": f"mine:{source}", "own.folder": str(folder), "data.train": [], "model.vocab_size": 128}
    run = make_run(workspace, **{**own, **changes})
    carry(run, RunDir.of(run.name, workspace))
    return run

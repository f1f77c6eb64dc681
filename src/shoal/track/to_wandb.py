"""Weights & Biases, online or offline.

W&B takes a point, answers at once and uploads when it can, so that it was taken does not mean that it arrived. Online,
therefore, each point carries the journal's offset: after a resume the server's own summary says how far it got, and
the rest is sent again. Offline there is no server to ask, and `wandb sync` of two folders of one run lets one overwrite
the other (tried with 0.31): so each session writes the whole run into a new folder and then deletes the older ones.
"""

from __future__ import annotations

import inspect
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import SetupError, needs_extra
from shoal.journal.rundir import RunDir
from shoal.masking import mask
from shoal.track.about import About
from shoal.track.cursor import Cursor
from shoal.track.events import Event
from shoal.track.knock import knock

if TYPE_CHECKING:
    import wandb

OFFSET = "shoal/journal_offset"
CONNECT_S = 20
FINISH_S = 12
# Off: capturing our output, reading the repository, saving code, host statistics and package lists of a mirror process
# would describe the mirror and not the training.
SETTINGS = {
    "console": "off",
    "silent": True,
    "disable_git": True,
    "disable_code": True,
    "x_disable_stats": True,
    "x_disable_meta": True,
    "x_save_requirements": False,
    "init_timeout": CONNECT_S,
    "finish_timeout": FINISH_S,
    "finish_timeout_raises": True,
}


class ToWandb:
    name = "wandb"
    most_values = 2000

    def __init__(self, run_dir: RunDir, offline: bool) -> None:
        self._folder = run_dir.track
        self._offline = self.durable = offline
        self._server = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
        self.address = "offline" if offline else mask(self._server)
        self.label = f"W&B files in {run_dir.track / 'wandb'}" if offline else f"W&B at {self.address}"
        self._run: wandb.Run | None = None
        self._older: list[Path] = []
        self._failed = False

    def open(self, about: About, cursor: Cursor) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        try:
            import wandb
        except ImportError:
            raise needs_extra("wandb", "wandb", "tracking with W&B") from None
        if not self._offline and not _logged_in():
            raise SetupError("W&B has no API key: run `wandb login` or set WANDB_API_KEY")
        self._drop()
        if not self._offline:
            knock(self._server)
        self._folder.mkdir(parents=True, exist_ok=True)
        run_id = str(cursor.remote.get("run_id") or about.key)
        if self._offline:
            cursor.forget()
            self._older = list((self._folder / "wandb").glob(f"offline-run-*-{run_id}"))
        self._run = wandb.init(
            project=about.track.experiment,
            id=run_id,
            name=about.name,
            group=about.track.group,
            tags=None if about.track.group is None else [about.track.group],
            dir=str(self._folder),
            mode="offline" if self._offline else "online",
            resume=None if self._offline else "allow",
            config={**about.spec, "shoal": about.tags},
            settings=wandb.Settings(**{k: v for k, v in SETTINGS.items() if k in wandb.Settings.model_fields}),
        )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        if not self._offline:
            cursor.offset = int(self._run.summary.get(OFFSET) or 0) if self._run.resumed else 0
        cursor.remote = {"run_id": run_id}

    def send(self, events: list[Event], cursor: Cursor) -> None:
        assert self._run is not None
        for event in events:
            if event.kind == "close":
                self._failed = event.note != "done"
                self._run.summary["shoal/status"] = event.note
            elif event.values and not event.again:
                row: dict[str, Any] = {**event.values, "step": event.step, "_timestamp": event.t}
                self._run.log(row if self._offline else {**row, OFFSET: event.offset})

    def finish(self) -> None:
        """Waits until the server has it all; raises when it does not answer in time."""
        if self._run is not None:
            self._run.finish(exit_code=int(self._failed))
            self._run = None
            for folder in self._older:
                shutil.rmtree(folder, ignore_errors=True)

    def _drop(self) -> None:
        """Leaves a connection that failed; what it had not uploaded will be sent again."""
        run, self._run = self._run, None
        if run is not None:
            try:
                run.finish(exit_code=1)
            except Exception:  # it failed before, that is why we are here; the pump has said so
                return


def _logged_in() -> bool:
    """Without asking: a mirror has no keyboard."""
    import wandb

    if "prompt" in inspect.signature(wandb.login).parameters:
        return bool(wandb.login(prompt=False, verify=False))
    return bool(wandb.api.api_key)  # before 0.30

"""Writes journals as a run would, with a clock of its own: for tests of everything that reads one."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.journal.rundir import RunDir
from shoal.spec import Run, dump, load
from shoal.spec.run import Track

RUN = Run.model_validate(
    {
        "name": "demo",
        "seed": 7,
        "model": {"dim": 64, "layers": 2},
        "data": {"train": "/data/train"},
        "train": {"steps": 200, "batch": 16, "optimizer": {"lr": 0.001}},
    }
)
IDENTITY: dict[str, Any] = {
    "shoal": "0.1.0",
    "git": {"commit": "0123abcd" * 5, "dirty": True},
    "python": "3.11.7",
    "packages": {"torch": "2.13.0"},
    "seed": 7,
    "argv": ["shoal", "train", "http://me:hunter2@host"],
    "data": {"/data/train": "f00d" * 8, "s3://bucket/eval": None},
}


@dataclass
class Story:
    """A run as it happens. Times are seconds; every method appends the records that a real run would."""

    run_dir: RunDir
    t: float = 1_700_000_000.0
    step_s: float = 0.5
    data_s: float = 0.02
    gap_s: float = 0.001  # between steps: writing the record
    tokens: int = 2048
    session: int = -1
    attempt: int = -1
    step: int = 0
    records: list[dict[str, Any]] = field(default_factory=list)

    def write(self, kind: str, **fields: Any) -> dict[str, Any]:
        record = {"v": 1, "kind": kind, "t": round(self.t, 6), **fields}
        self.records.append(record)
        self.run_dir.path.mkdir(parents=True, exist_ok=True)
        with open(self.run_dir.journal_file, "a") as f:
            f.write(json.dumps(record) + "\n")
        return record

    def open(self, resumed: bool = False) -> Story:
        self.session += 1
        self.write("open", session=self.session, pid=4242, host="box", argv=["shoal", "train"], resumed=resumed)
        return self

    def start(self, at_step: int | None = None, startup_s: float = 3.0, peak_flops: float | None = None) -> Story:
        """A new attempt from `at_step` committed steps on."""
        self.attempt += 1
        self.step = self.step if at_step is None else at_step
        self.write("attempt", attempt=self.attempt, world=2, pids=[1, 2])
        self.t += startup_s
        self.write(
            "start",
            attempt=self.attempt,
            step=self.step,
            world=2,
            mesh={"dp_replicate": 2, "dp_shard": 1, "micro_batch": 8},
            device="cpu" if peak_flops is None else "NVIDIA H100 80GB HBM3",
            params=1_000_000,
            precision="fp32",
            total=200,
            flops_convention="causal, documents apart",
            peak_flops=peak_flops,
            resumed_from=self.step or None,
        )
        return self

    def steps(self, until: int, loss_shift: float = 0.0) -> Story:
        while self.step < until:
            self.t += self.gap_s
            begin = self.t
            self.t += self.step_s
            self.step += 1
            self.write(
                "step",
                attempt=self.attempt,
                step=self.step,
                begin=round(begin, 6),
                position=(self.step - 1) * 16,
                samples=16,
                tokens=self.tokens,
                targets=self.tokens - 16,
                loss=loss_at(self.step) + loss_shift,
                grad_norm=1.0 + 1.0 / self.step,
                lr=0.001,
                flops=6e6 * self.tokens,
                hardware_flops=8e6 * self.tokens,
                time={"data_s": self.data_s, "compute_s": self.step_s - self.data_s - 0.01, "optimizer_s": 0.01},
            )
        return self

    def activity(self, kind: str, duration_s: float, **fields: Any) -> Story:
        """`eval`, `checkpoint` or `checkpoint_failed`: something that takes time between steps."""
        begin = self.t
        self.t += duration_s
        self.write(kind, attempt=self.attempt, step=self.step, begin=round(begin, 6), **fields)
        return self

    def eval(self, duration_s: float = 1.0) -> Story:
        return self.activity("eval", duration_s, loss=loss_at(self.step) + 0.1, targets=5000)

    def checkpoint(self, duration_s: float = 0.4) -> Story:
        return self.activity("checkpoint", duration_s, bytes=12_000_000, path=f"step-{self.step:08d}-term-1")

    def failure(self, after_s: float = 0.2, action: str = "restarting from step 100") -> Story:
        self.t += after_s
        self.write(
            "failure",
            attempt=self.attempt,
            rank=1,
            cause="killed",
            evidence="ended by SIGKILL",
            exit_code=None,
            signal=9,
            action=action,
        )
        return self

    def wait(self, seconds: float) -> Story:
        self.t += seconds
        return self

    def close(self, status: str = "done", exit_code: int = 0, reason: str = "") -> Story:
        self.t += 0.3
        self.write(
            "close",
            session=self.session,
            status=status,
            exit_code=exit_code,
            reason=reason or f"{self.step} steps are done",
        )
        return self


def loss_at(step: int) -> float:
    return 2.0 + 5.0 * math.exp(-step / 60) + 0.05 * math.sin(step)


def make_run(workspace: Path, name: str = "demo", **track: Any) -> Story:
    """A run directory with a spec and an identity, and an empty story to tell in it."""
    run_dir = RunDir.of(name, workspace)
    run_dir.path.mkdir(parents=True)
    write_spec(run_dir, RUN.model_copy(update={"name": name, "track": Track(**track)}))
    run_dir.identity_file.write_text(json.dumps(IDENTITY))
    return Story(run_dir)


def write_spec(run_dir: RunDir, run: Run) -> None:
    run_dir.spec_file.write_text(dump(run))


def change_spec(run_dir: RunDir, **changes: Any) -> None:
    """As a resume with overrides does: `change_spec(run_dir, train={"steps": 400})`."""
    now = load(run_dir.spec_file).run.model_dump()
    for section, values in changes.items():
        now[section] |= values
    write_spec(run_dir, Run.model_validate(now))


def crash_and_finish(story: Story) -> Story:
    """200 steps; rank 1 killed at step 150, restarted from the checkpoint of step 100."""
    story.open().start().steps(50).eval().steps(100).checkpoint().eval().steps(150)
    story.failure().wait(1.0).start(at_step=100).steps(200).eval().checkpoint().close()
    return story

"""Takes a few steps of a run's trainer under torch's profiler, and leaves the trace of this process in a folder.

Nothing of the run is touched: no run directory, no checkpoint, no journal, no tracker; weights are those of a new run.
"""

from __future__ import annotations

import errno
import gzip
import json
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from shoal.data.feed import Feed
from shoal.devices import cores
from shoal.errors import Stopped, TransientError
from shoal.journal.rundir import RunDir
from shoal.parallel.place import Place
from shoal.profile.launches import name_triton_launches
from shoal.profile.processes import NOT_WRITTEN, trace_file
from shoal.profile.ranges import Ranges
from shoal.spec.run import Run
from shoal.spec.shape import Shape
from shoal.train.loop import Training, train
from shoal.train.numerics import Numerics
from shoal.train.parts import Parts, prepare
from shoal.train.saves import Saves

FORMAT = 1  # of what a trace says about itself, under the key "shoal"
SETTLING_STEPS = 3  # compile, allocate, count traffic: their time says nothing
RAW = ".raw.json"


@dataclass(frozen=True)
class Asked:
    steps: int  # that are traced and analysed
    warmup: int  # before them, untraced


def capture(run: Run, place: Place, workspace: Path, folder: Path, asked: Asked, stop: Callable[[], bool]) -> None:
    torch.set_num_threads(cores.threads(int(run.resources.threads)))
    # One step more for the profiler to warm up in, and one after the last: on a GPU a step ends where the next begins.
    needed = asked.warmup + 1 + asked.steps + 1
    run = run.model_copy(update={"train": run.train.model_copy(update={"steps": max(run.steps, needed + 1)})})
    _name_compiled_kernels()
    parts = prepare(RunDir.of(run.name, workspace), run, place)
    parts.load_weights()
    over = False

    def ready(_: object) -> None:
        nonlocal over
        over = True

    cuda = place.device.type == "cuda"
    if cuda:
        name_triton_launches()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    cycle = schedule(wait=asked.warmup, warmup=1, active=asked.steps + 1, repeat=1)
    profiler = profile(activities=activities, schedule=cycle, on_trace_ready=ready, record_shapes=True)
    steps, done = Steps(profiler, asked, cuda), Done(parts.model.shape, run.data.seq_len)
    ranges = Ranges(steps.begin)
    feed = Feed(parts.windows, parts.order, run.train.batch, place.at["dp"], place.sizes.dp, int(run.mesh.micro_batch))
    training = Training(
        run,
        place,
        parts.model,
        parts.optimizers,
        feed,
        tell=done.tell,
        told_to_stop=lambda: over or stop(),
        evaluate=lambda step: None,
        saves=cast(Saves, NoSaves()),
        pulse=ranges,
        numerics=Numerics(run.guard, parts.state.skips),
    )
    try:
        with profiler:
            train(training, 0)
    except Stopped:
        if not over:
            raise Stopped("stopped before the trace was whole; nothing was kept.") from None
    finally:
        ranges.close()
        feed.close()
    about = {**_about(parts, asked, steps), **done.about(asked)}
    _export(profiler, trace_file(folder, place.rank), about)


def _name_compiled_kernels() -> None:
    """On a processor, what the compiler generates shows up in a trace only if it is told so before it compiles."""
    with suppress(ImportError, AttributeError):  # another torch: that time is then the host's
        import torch._inductor.config as inductor

        inductor.cpp.enable_kernel_profile = True


class Steps:
    """Tells the profiler of each step, and times them by a clock that is not the trace's.

    A profiler that starts or stops takes seconds, which are no step's. A GPU is waited for where untraced steps begin
    and end to be timed, as the host may be ahead of it."""

    def __init__(self, profiler: profile, asked: Asked, cuda: bool) -> None:
        self._profiler, self._asked = profiler, asked
        self._quiet = min(SETTLING_STEPS, asked.warmup - 1)  # the first untraced step that is timed
        self._cuda = cuda
        self._begun_s: list[float] = []
        self._ended_s: list[float] = []

    def begin(self) -> None:
        if self._cuda and len(self._begun_s) in (self._quiet, self._asked.warmup):
            torch.cuda.synchronize()
        if self._begun_s:
            self._ended_s.append(time.perf_counter())
            self._profiler.step()
        self._begun_s.append(time.perf_counter())

    @property
    def untraced_s(self) -> float:
        """One of them."""
        last = self._asked.warmup
        return (self._ended_s[last - 1] - self._begun_s[self._quiet]) / (last - self._quiet)

    @property
    def traced_s(self) -> list[float]:
        first = self._asked.warmup + 1
        return [self._ended_s[i] - self._begun_s[i] for i in range(first, first + self._asked.steps)]


class Done:
    """What the traced steps had to compute, from their records. `attended`: of attention's square, as a share."""

    def __init__(self, shape: Shape, seq: int) -> None:
        self._shape, self._seq = shape, seq
        self._records: list[dict[str, Any]] = []

    def tell(self, kind: str, **fields: Any) -> None:
        if kind == "step":
            self._records.append(fields)

    def about(self, asked: Asked) -> dict[str, float]:
        """A step, on average, by all processes."""
        first = asked.warmup + 1
        traced = self._records[first : first + asked.steps] or self._records[-1:]
        names = {"flops_per_step": "flops", "hardware_flops_per_step": "hardware_flops", "tokens_per_step": "tokens"}
        if not traced:
            return {}
        about = {name: sum(float(r[of]) for r in traced) / len(traced) for name, of in names.items()}
        tokens, shape = about["tokens_per_step"], self._shape
        attention = about["flops_per_step"] - (6 * shape.matrix_params + shape.mixing_flops_per_token) * tokens
        pair, layers = shape.flops_per_pair, shape.attending_layers
        return {**about, "attended": attention / (pair * layers * tokens * self._seq) if layers else 0.0}


class NoSaves:
    """In place of `shoal.train.saves.Saves`: a profile leaves no checkpoint."""

    def votes(self, step: int) -> tuple[float, ...]:
        return (0.0,) * 6

    def heard(self, *together: float) -> None: ...
    def settle(self) -> None: ...
    def after(self, done: int) -> None: ...
    def now(self, step: int, must: bool) -> None: ...
    def close(self) -> None: ...


def _about(parts: Parts, asked: Asked, steps: Steps) -> dict[str, Any]:
    """What the analysis must know beside the events, so that a trace can be read anywhere."""
    run, place, shape = parts.run, parts.place, parts.model.shape
    cuda = place.device.type == "cuda"
    return {
        "format": FORMAT,
        "run": run.name,
        "rank": place.rank,
        "world": place.world,
        "processes_here": int(os.environ.get("LOCAL_WORLD_SIZE", place.world)),
        "threads": int(run.resources.threads),
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "compiled": bool(run.train.compile),
        "vocab_size": shape.vocab_size,
        "dim": shape.dim,
        "tokens_per_step": run.train.batch * run.data.seq_len,
        "steps": asked.steps,
        "tf32": torch.get_float32_matmul_precision() != "highest" if cuda else False,
        "step_s": steps.traced_s,
        "untraced_step_s": steps.untraced_s,
        "memory_bytes": torch.cuda.max_memory_allocated(place.device) if cuda else None,
        **parts.about(),
    }


def _export(profiler: profile, file: Path, about: dict[str, Any]) -> None:
    """Kineto's file, with ours in its head, packed. Kineto says nothing of a full disk, so what it wrote is looked at.

    A file under its last name is whole."""
    raw, packing = file.with_suffix("").with_suffix(RAW), file.with_name(f".{file.name}.tmp")
    try:
        profiler.export_chrome_trace(str(raw))
        _check_whole(raw)
        with open(raw, "rb") as source, gzip.open(packing, "wb", compresslevel=3) as packed:
            while source.read(1) != b"{":  # after a line break, as of torch 2.13
                pass
            packed.write(b'{\n "shoal": ' + json.dumps(about).encode() + b",")
            shutil.copyfileobj(source, packed, 1 << 20)
        packing.rename(file)
    except (OSError, RuntimeError) as e:
        why = e.strerror if isinstance(e, OSError) and e.strerror else str(e).splitlines()[0]
        raise TransientError(f"{NOT_WRITTEN} {file} ({why}); free space, or choose another --out.") from e
    finally:
        for left in (raw, raw.with_name(f"{raw.name}.tmp")):  # Kineto's own name for what it has not finished
            left.unlink(missing_ok=True)
        packing.unlink(missing_ok=True)


def _check_whole(raw: Path) -> None:
    end = b""
    if raw.exists():
        with open(raw, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 64))
            end = file.read().rstrip()
    if not end.endswith(b"}"):
        free = shutil.disk_usage(raw.parent).free
        raise OSError(errno.ENOSPC, f"the profiler could not write it to its end; {free:,} bytes are free there")

"""Run directories: journals, their index, pulses, identities, plans; every view of a run, and `resume`."""

from __future__ import annotations

import gzip
import json
import struct
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.json_values import edge, encoded, mutated
from tests.fuzz.of_data import data_set, emptied
from tests.fuzz.raw_bytes import damaged
from tests.fuzz.reader import Finding, Folder, Target, reader
from tests.fuzz.samples import lines_of, texts_of
from tests.fuzz.verbs import shoal


def run_folder(workspace: Path) -> Folder:
    """A run that failed once and ended; short, so that a case is quick."""
    from tests.journal.journals import make_run

    story = make_run(workspace, "demo")
    story.open().start().steps(4).eval().checkpoint().steps(6).failure().wait(1.0).start(at_step=4).steps(
        8
    ).eval().close()
    run = workspace / "runs" / "demo"
    plan = {"step_s": 0.5, "parts_s": {"compute": 0.4, "update": 0.05, "islands": 0.0}, "step_low_s": 0.4}
    plan |= {"step_high_s": 0.6, "figures": "the catalogue", "device": "cpu", "load": 1.0, "cores": 2}
    (run / "plan.json").write_text(json.dumps(plan))
    (run / "logs" / "attempt-000").mkdir(parents=True)
    (run / "logs" / "attempt-000" / "rank-00000.log").write_text("a line\n")
    (run / "supervisor.lock").write_text(json.dumps({"pid": 4242, "host": "box", "started": 1.7e9}))
    (run / "job.json").write_text(json.dumps(JOB))
    return Folder({str(p.relative_to(run)): p.read_bytes() for p in sorted(run.rglob("*")) if p.is_file()})


JOB: dict[str, Any] = {
    "run": "demo",
    "backend": "slurm",
    "id": "123",
    "submitted": 1.7e9,
    "nodes": 1,
    "gpus": 0,
    "workspace": "/w",
    "bundle": "ab",
    "where": {"cluster": "c"},
    "stopped": None,
}


@reader("journal", "journal.journal", "journal.record", "journal.tail", "journal.columns", quick=800, share=300)
def journal(folder: Path) -> Target:
    """One line of a journal: a record within its shape, or none."""
    from shoal.journal.record import parse

    lines = [json.loads(line) for line in run_folder(folder / "w")["journal.jsonl"].splitlines()]

    def read(line: bytes) -> None:
        record = parse(line)
        if record is not None and not isinstance(record["kind"], str):
            raise Finding("a record of no kind")

    return Target(texts_of(*lines), read)


@reader(
    "views",
    "observe.status",
    "observe.time_ledger",
    "observe.report",
    "observe.planned",
    "observe.history",
    "observe.curves",
    "observe.lives",
    "observe.steps",
    "journal.reading",
    "track.about",
    "track.cursor",
    "guard.history",
    "cli.ps",
    "cli.report",
    quick=12,
    share=10,
)
def views(folder: Path) -> Target:
    """`ps`, `ps NAME`, `logs` and `report` of a damaged run: said in a sentence; the run beside it is shown."""
    from shoal.errors import ShoalError

    workspace = folder / "w"
    good = run_folder(workspace)
    del good["job.json"]
    other = make_other(workspace)
    journal = [json.loads(line) for line in good["journal.jsonl"].splitlines()]
    of_lines = lines_of(journal)

    def generate(rng: Random) -> Folder:
        case, roll = Folder(good), rng.random()
        if roll < 0.6:
            case["journal.jsonl"] = of_lines(rng)
        else:
            name = rng.choice([n for n in case if n != "journal.jsonl"])
            text = good[name]
            as_json = name.endswith(".json") and rng.random() < 0.8
            case[name] = encoded(mutated(rng, json.loads(text))) if as_json else damaged(rng, text)
        if rng.random() < 0.03:
            del case[rng.choice(tuple(case))]
        return case

    def read(case: Folder) -> None:
        case.write(emptied(workspace / "runs" / "demo"))
        where = ("--workspace", str(workspace))
        if other not in shoal("ps", *where):
            raise Finding("one damaged run hides another")
        json.loads(shoal("ps", "--json", *where))
        wrong = None
        for argv in (
            ["ps", "demo"],
            ["ps", "demo", "--json"],
            ["logs", "demo"],
            ["report", "demo", "--no-png"],
            ["report", "demo", "--no-png", "--json"],
        ):
            try:
                shoal(*argv, *where)
            except ShoalError as e:
                wrong = e
        if wrong is not None:
            raise wrong

    return Target(generate, read, (ShoalError, OSError), lines=True)


def make_other(workspace: Path) -> str:
    from tests.journal.journals import make_run

    make_run(workspace, "healthy").open().start().steps(2).close()
    return "healthy"


@reader("resume", "cli.resume", "guard.begin", "journal.lock", "spec.identity", "spec.begun", quick=6, share=4)
def resume(folder: Path) -> Target:
    """`resume` of a damaged run directory, up to where the workers would be started."""
    import shoal.cli.resume as verb
    from shoal.errors import ShoalError

    workspace = folder / "w"
    good = run_folder(workspace)
    del good["job.json"]
    data_set(folder / "data")
    spec = good["run.yaml"].decode().replace("/data/train", str(folder / "data"))
    good["run.yaml"] = spec.encode()
    records = [json.loads(line) for line in good["journal.jsonl"].splitlines()][:-1]
    of_lines = lines_of(records)
    verb.supervise = lambda *args, **more: 0  # type: ignore[assignment]

    def generate(rng: Random) -> Folder:
        case, roll = Folder(good), rng.random()
        if roll < 0.4:
            case["journal.jsonl"] = of_lines(rng)
        elif roll < 0.7:
            case["run.yaml"] = damaged(rng, good["run.yaml"])
        else:
            name = rng.choice([n for n in case if n.endswith(".json")])
            case[name] = encoded(mutated(rng, json.loads(good[name])))
        if rng.random() < 0.05:
            del case[rng.choice(tuple(case))]
        return case

    def read(case: Folder) -> None:
        case.write(emptied(workspace / "runs" / "demo"))
        shoal("resume", "demo", "--workspace", str(workspace))

    return Target(generate, read, (ShoalError, OSError), lines=True)


@reader("journal-index", "journal.index", quick=25, share=20)
def journal_index(folder: Path) -> Target:
    """The columns beside a long journal: what does not fit is made anew."""
    from shoal.errors import ShoalError
    from shoal.journal import index

    file = folder / "journal.jsonl"
    lines = run_folder(folder / "w")["journal.jsonl"].splitlines(keepends=True)
    file.write_bytes(b"".join(lines[2:12]) * 40)
    index.blocks_of(file, 2000)
    beside = index.index_file(file)
    good, frame = beside.read_bytes(), 16

    def generate(rng: Random) -> bytes:
        if rng.random() < 0.4:
            return damaged(rng, good, head=400)
        at = len(index.MAGIC)  # the first block: its header, made anew
        size = int.from_bytes(good[at + 4 : at + 8], "little")
        text = encoded(mutated(rng, json.loads(good[at + frame : at + frame + size])))
        return good[:at] + index._framed(text) + text + good[at + frame + size :]

    def read(data: bytes) -> None:
        beside.write_bytes(data)
        for block in index.blocks_of(file, 2000):
            for name in block.arrays():
                block.load(name)

    return Target(generate, read, (ShoalError,))


@reader("pulse", "journal.pulse_file", "journal.pulse", "journal.pulses", quick=800, share=300)
def pulse(folder: Path) -> Target:
    from shoal.journal import pulse_file as p

    texts: list[Any] = [{"excuse": "saving", "groups": {"dp": [3, 4, 1.5]}}, [[["f.py", 3, "run"]], []]]
    head = p.HEAD.pack(5, 42, 3, 10, 2, 1, *([0.5] * ((p.HEAD.size - 56) // 8)), 5)
    pad = bytes(p.SAMPLE_AT - len(head))

    def generate(rng: Random) -> bytes:
        facts, stacks = (json.dumps(t).encode() for t in texts)
        roll = rng.random()
        if roll < 0.4:
            facts = encoded(mutated(rng, texts[0]))
        elif roll < 0.8:
            stacks = encoded(mutated(rng, texts[1]))
        sample = p.SAMPLE.pack(7, 1.5, len(facts), len(stacks), 3, 1) + facts + stacks + struct.pack("<Q", 7)
        data = head + pad + sample
        return data if roll < 0.8 else damaged(rng, data, head=len(head))

    def read(data: bytes) -> None:
        p.beat_of(data)
        if (sample := p.sample_of(data[p.SAMPLE_AT :])) is not None:
            for name, number in sample.groups.items():
                str(name), number
            for frame in (*sample.stack, *sample.reader):
                str(frame)
            str(sample.excuse)
        p.news(data.ljust(p.SIZE, b"\0"), (0, 0))

    return Target(generate, read)


@reader("flights", "guard.flights", "parallel.flight", quick=400, share=100)
def flights(folder: Path) -> Target:
    from shoal.guard import flights as f
    from shoal.parallel.flight import cut_down

    one = {"collective_seq_id": 5, "profiling_name": "nccl:all_reduce", "state": "started", "is_p2p": False}
    good = {"groups": {"0": {"ranks": [0, 1], "axis": "dp", "collectives": [one, one]}}}
    nccl = {
        "version": "2.4",
        "pg_config": {"0": {"name": "0", "desc": "dp", "ranks": "[0, 1]"}},
        "pg_status": {},
        "entries": [{**one, "pg_id": 0, "process_group": ["0", "dp"], "record_id": 1, "time_created_ns": 5}],
    }
    file = folder / "rank-00000.flight"

    def read(data: bytes) -> None:
        file.write_bytes(data)
        said = f._read(file)
        if said is not None:
            f.sentence({0: said, 1: good})
        try:
            told = json.loads(data) if len(data) <= f.MOST_BYTES else None  # torch's own, of a few hundred collectives
        except (ValueError, RecursionError):
            return
        if isinstance(told, dict) and "entries" in told:
            cut_down(told, {"0": "dp"})

    return Target(texts_of(good, nccl), read)


@reader(
    "trace",
    "profile.trace",
    "profile.analyse",
    "profile.on_cpu",
    "profile.on_gpu",
    "profile.kernels",
    quick=150,
    share=30,
)
def trace(folder: Path) -> Target:
    """A trace of torch's profiler, as `shoal profile --trace` takes it."""
    from shoal.errors import ShoalError
    from shoal.profile.analyse import analyse

    def event(name: str, cat: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
        return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "pid": 1, "tid": 2, "args": args}

    good = {
        "deviceProperties": [{"name": "NVIDIA H200", "totalGlobalMem": 1}],
        "shoal": {"device": "NVIDIA H200", "steps": 2, "world": 1},
        "traceEvents": [
            event("ProfilerStep#1", "user_annotation", 0.0, 100.0),
            event("ProfilerStep#2", "user_annotation", 100.0, 100.0),
            event("shoal.forward", "user_annotation", 1.0, 50.0),
            event("aten::mm", "cpu_op", 2.0, 10.0, **{"External id": 3, "Sequence number": 1}),
            event("cudaLaunchKernel", "cuda_runtime", 3.0, 1.0, correlation=9, **{"External id": 3}),
            event("gemm", "kernel", 5.0, 20.0, correlation=9, device=0, stream=7, **{"External id": 3}),
        ],
    }
    file = folder / "t.json"

    def generate(rng: Random) -> bytes:
        text = encoded(mutated(rng, good))
        roll = rng.random()
        return (
            text if roll < 0.8 else damaged(rng, gzip.compress(text, 1, mtime=0)) if roll < 0.9 else damaged(rng, text)
        )

    def read(data: bytes) -> None:
        file.write_bytes(data)
        analyse(file)

    return Target(generate, read, (ShoalError,))


@reader(
    "small-files",
    "journal.lock",
    "guard.begin",
    "launch.job",
    "launch.slurm.notes",
    "launch.sweep",
    "track.cursor",
    "track.about",
    "launch.ray.node",
    "observe.status",
    quick=300,
    share=60,
)
def small_files(folder: Path) -> Target:
    """What one process leaves for the next: locks, jobs, notes, sweeps, cursors."""
    from shoal.errors import ShoalError
    from shoal.guard.begin import other_code, same_data
    from shoal.journal import lock
    from shoal.journal.rundir import RunDir
    from shoal.launch import job, sweep
    from shoal.launch.ray.node import _last_step
    from shoal.launch.slurm import notes
    from shoal.observe import status
    from shoal.spec import dump
    from shoal.track import about
    from shoal.track.cursor import Cursor
    from tests.journal.journals import IDENTITY, RUN

    run_dir = RunDir.of("demo", folder)
    run_dir.path.mkdir(parents=True)
    (run_dir.path / "track").mkdir(exist_ok=True)
    sweep_file = sweep.file_of("demo", folder)
    sweep_file.parent.mkdir(parents=True)
    good: dict[str, Any] = {
        "j": JOB,
        "n": {
            "furthest": 3,
            "in_a_row": 1,
            "excluded": {"n1": "bad"},
            "code": 75,
            "why": "x",
            "over": False,
            "time": 1.5,
        },
        "s": {
            "name": "demo",
            "points": {"demo-1": ["train.steps=3"]},
            "total": 10,
            "early": True,
            "stopped": {"demo-1": 5},
        },
        "c": {"address": "http://a", "offset": 5, "remote": {"id": "x"}},
        "l": {"pid": 5, "host": "h", "started": 1.5},
        "t": {"kind": "step", "step": 3},
        "i": IDENTITY,
    }
    spec = dump(RUN).encode()
    run_dir.spec_file.write_text(dump(RUN))

    def generate(rng: Random) -> bytes:
        if rng.random() < 0.1:
            return b"y" + damaged(rng, spec.replace(b"steps:", rng.choice((b"steps:", b'"steps" :', b"stepz:"))))
        kind = rng.choice(tuple(good))
        text = encoded(mutated(rng, good[kind]) if rng.random() < 0.95 else edge(rng))
        return kind.encode() + (text if rng.random() < 0.85 else damaged(rng, text))

    def read(data: bytes) -> None:
        kind, text = data[:1], data[1:]
        if kind == b"j":
            (run_dir.path / job.FILE).write_bytes(text)
            found = job.remembered(run_dir)
            if found is not None:
                job.on(found)
        elif kind == b"n":
            (folder / "n.json").write_bytes(text)
            notes.read(folder / "n.json")
        elif kind == b"s":
            sweep_file.write_bytes(text)
            sweep.Sweep.read("demo", folder)
        elif kind == b"c":
            (run_dir.track / "mlflow.json").write_bytes(text)
            Cursor.load(run_dir, "mlflow", "http://a")
        elif kind == b"l":
            run_dir.pid_file.write_bytes(text)
            status._holder(run_dir)
            with open(run_dir.pid_file, "rb") as held:
                lock._already(run_dir, lock._read(held.fileno()))
        elif kind == b"y":
            (folder / "run.yaml").write_bytes(text)
            status.total_steps(folder / "run.yaml")
        elif kind == b"i":
            run_dir.identity_file.write_bytes(text)
            same_data(run_dir, ["/data/train"])
            other_code(run_dir, RUN)
            about._identity(run_dir)
        else:
            (folder / "j.jsonl").write_bytes(text + b"\n")
            _last_step(folder / "j.jsonl")

    return Target(generate, read, (ShoalError,))

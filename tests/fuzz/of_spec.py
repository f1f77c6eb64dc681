"""What people write: run files, overrides, tables of hardware and of published runs."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.json_values import TEXTS, edge, mutated
from tests.fuzz.raw_bytes import damaged
from tests.fuzz.reader import Finding, Target, reader

RUN: dict[str, Any] = {
    "name": "demo",
    "model": {"dim": 32, "layers": 1, "heads": 2},
    "data": {"train": [{"path": "data", "weight": 1.0}], "seq_len": 16, "eval": ["e"]},
    "train": {"steps": 5, "batch": 4, "optimizer": {"name": "adamw", "lr": 0.001}, "schedule": {"warmup_steps": "5%"}},
    "resources": {"processes": 1, "threads": 1, "device": "cpu"},
    "mesh": {"dp_shard": 1},
    "checkpoint": {"every": 10, "keep": 3},
    "track": {"mlflow": False},
    "guard": {"backoff_s": 0.01},
    "launch": {"on": "local", "nodes": 1, "time_limit": "2h"},
}


@reader("run-file", "spec.yaml_text", "spec.resolve", "spec.layers", "spec.problems", "spec.write", quick=30, share=12)
def run_file(folder: Path) -> Target:
    """What is taken loads equal again when it is written."""
    import yaml

    from shoal.errors import ShoalError
    from shoal.spec import dump, load

    file, again = folder / "run.yaml", folder / "again.yaml"
    good = yaml.safe_dump(RUN, sort_keys=False).encode()

    def generate(rng: Random) -> bytes:
        if rng.random() < 0.25:
            return damaged(rng, good)
        value = mutated(rng, RUN)
        try:
            return yaml.dump(value, Dumper=yaml.SafeDumper, sort_keys=False, allow_unicode=True).encode(
                "utf-8", "surrogatepass"
            )
        except (yaml.YAMLError, RecursionError, ValueError):
            return damaged(rng, good)

    def read(data: bytes) -> None:
        file.write_bytes(data)
        run = load(file).run
        again.write_text(dump(run), encoding="utf-8")
        if load(again).run != run:
            raise Finding("a run file that is another after a round trip")

    return Target(generate, read, (ShoalError,), lines=True)


@reader("yaml", "spec.yaml_text", quick=200, share=60)
def yaml_text(folder: Path) -> Target:
    from shoal.errors import SpecError
    from shoal.spec.yaml_text import parse

    good = b"a: 1\nb: [1, 2.5, .nan, 0x1F, 1e400]\nc: {d: e, '<<': {g: null}}\nh: |\n  text\n? j\n: k\n"
    marks = (
        b"&a [*a]",
        b"*x",
        b"!!binary x",
        b"!!python/name:os.system",
        b"- " * 300,
        b"[" * 300,
        b"{a: " * 300,
        b"\x00",
        b"\xe2\x80\xa8",
        b"? ",
        b"<<: ",
        b"---\n",
        b"%YAML 9.9\n",
        b"'",
        b"\t",
    )

    def generate(rng: Random) -> str:
        held = bytearray(good)
        for _ in range(rng.randrange(0, 4)):
            at = rng.randrange(len(held) + 1)
            held[at:at] = rng.choice(marks)
        data = bytes(held) if rng.random() < 0.5 else damaged(rng, bytes(held))
        return data.decode("utf-8", "replace")

    return Target(generate, lambda text: parse(text, "run.yaml"), (SpecError,), lines=True)


@reader("overrides", "spec.overrides", quick=400, share=60)
def overrides(folder: Path) -> Target:
    """`train.steps=100` and its like, against nothing but the names of the run file."""
    from shoal.errors import ShoalError
    from shoal.spec.layers import Layer
    from shoal.spec.overrides import apply, split_overrides

    good = (
        "train.steps=100",
        "--train.steps=3",
        "data.train=[a, {path: b, weight: 2}]",
        "data.train.0.weight=2",
        "mesh=auto",
        "seed=7",
        "train.optimizer.lr=1e-3",
    )

    def generate(rng: Random) -> list[str]:
        said = []
        for _ in range(rng.randrange(1, 4)):
            name, _, value = rng.choice(good).partition("=")
            roll = rng.random()
            if roll < 0.4:
                value = str(edge(rng)) if rng.random() < 0.7 else rng.choice(TEXTS)
            elif roll < 0.7:
                name = str(mutated(rng, name))
            text = f"{name}={value}" if rng.random() < 0.9 else name
            said.append(
                text
                if rng.random() < 0.7
                else damaged(rng, text.encode("utf-8", "surrogatepass")).decode("utf-8", "replace")
            )
        return said

    def read(argv: list[str]) -> None:
        _, found = split_overrides(argv)
        apply(found, Layer(), "/folder")

    return Target(generate, read, (ShoalError,), lines=True)


@reader("hardware", "plan.hardware_read", "plan.hardware_build", "plan.constants", quick=150, share=30)
def hardware(folder: Path) -> Target:
    """A file of devices and fabrics that a person adds."""
    import shoal.plan
    from shoal.errors import SpecError
    from shoal.plan.hardware_read import read as read_hardware

    samples = [f.read_bytes() for f in sorted((Path(shoal.plan.__file__).parent / "hardware").glob("*.toml"))]
    good = min(samples, key=len)

    def read(text: str) -> None:
        read_hardware(text, "box.toml")

    return Target(lambda rng: damaged(rng, good, most=4).decode("utf-8", "replace"), read, (SpecError,))


@reader("published-runs", "plan.published", quick=20, share=10)
def published(folder: Path) -> Target:
    """A table of published runs, as `plan --validate` takes it."""
    from shoal.errors import SpecError
    from shoal.plan import published as p

    file = folder / "t.csv"
    head = "row_id,source,gpu_type,n_gpus,layers,hidden,heads,seq,global_batch,microbatch,tp,pp,cp,ep,vpp,sharding,recompute,precision,tokens_s_gpu,step_time_s,mem_GB,software,fabric\n"  # noqa: E501
    row = "1,s,H100,64,32,4096,32,8192,128,1,1,1,1,1,1,fsdp,full,bf16,10000,5.2,60,torchtitan,\n"

    def read(data: bytes) -> None:
        file.write_bytes(data)
        list(p.read(file))

    return Target(lambda rng: damaged(rng, (head + row * 2).encode(), head=len(head)), read, (SpecError,))

"""Batches: the folder that runners agree by, its views, and files of items."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.json_values import encoded, mutated
from tests.fuzz.of_data import emptied
from tests.fuzz.raw_bytes import damaged
from tests.fuzz.reader import Finding, Folder, Target, reader
from tests.fuzz.samples import file_target, lines_of
from tests.fuzz.verbs import shoal


def a_batch(folder: Path) -> Folder:
    """Five units that a machine has run, one of which fails."""
    from shoal.cli.main import main

    folder.mkdir(parents=True)
    (folder / "items").write_text("a\nb\nc\nd\ne\n")
    command = 'echo "$1"; test "$1" != c'
    words = ["batch", "--name", "demo", "--workspace", str(folder), "--items", str(folder / "items"), "--retries", "0"]
    main([*words, "guard.backoff_s=0.001", "--", "sh", "-c", command, "sh", "{item}"])
    run = folder / "runs" / "demo"
    return Folder({str(p.relative_to(run)): p.read_bytes() for p in sorted(run.rglob("*")) if p.is_file()})


@reader(
    "batch-views",
    "journal.units",
    "journal.claims",
    "observe.batch",
    "observe.unit_logs",
    quick=40,
    share=20,
)
def batch_views(folder: Path) -> Target:
    """`ps`, `report` and `logs` of a batch whose folder is damaged: said in a sentence, or shown as far as it goes;
    and the claims that a runner would make there."""
    from shoal.errors import ShoalError
    from shoal.journal.claims import Claims, Runner, Watch, round_of, runners
    from shoal.journal.rundir import RunDir
    from shoal.journal.units import Folder as Units
    from shoal.values import BadValue

    workspace = folder / "w"
    good = a_batch(workspace)

    def generate(rng: Random) -> Folder:
        case = Folder(good)
        name = rng.choice([n for n in case if n.startswith("units/")])
        text = good[name]
        if name.endswith(".jsonl"):
            case[name] = lines_of([json.loads(line) for line in text.splitlines()])(rng)
        elif text[:1] == b"{" and rng.random() < 0.8:
            case[name] = encoded(mutated(rng, json.loads(text)))
        else:
            case[name] = damaged(rng, text)
        if rng.random() < 0.05:
            del case[rng.choice(tuple(case))]
        return case

    def read(case: Folder) -> None:
        case.write(emptied(workspace / "runs" / "demo"))
        where, wrong = ("--workspace", str(workspace)), None
        shoal("ps", *where)
        for argv in (["ps", "demo"], ["ps", "demo", "--json"], ["report", "demo"], ["logs", "demo"]):
            try:
                shoal(*argv, *where)
            except ShoalError as e:
                wrong = e
        units = Units(RunDir.of("demo", workspace))
        runners(units)
        if (plan := units.plan()) is not None and plan.blocks < 100 and units.rounds.is_dir() and units.blocks.is_dir():
            me = Runner.me(0, 1)
            claims = Claims(units, plan.blocks, round_of(units, None), me, 0, Watch(units, lease_s=0.0))
            for _ in range(plan.blocks + 1):
                if claims.take(0.0) is None:
                    break
            else:
                raise Finding("more blocks are claimed than there are")
        units.read_items()
        if wrong is not None:
            raise wrong

    return Target(generate, read, (ShoalError, OSError), silent=(BadValue,), lines=True)


@reader("batch-items", "journal.units", quick=150, share=30)
def batch_items(folder: Path) -> Target:
    from shoal.errors import ShoalError
    from shoal.journal.units import MOST_LINE, read_lines

    def generate(rng: Random) -> bytes:
        lines = [bytes(rng.choices(b"abc/. {}\r", k=rng.randrange(12))) for _ in range(rng.randrange(8))]
        if rng.random() < 0.05:
            lines.append(b"x" * rng.choice([MOST_LINE // 4 - 1, MOST_LINE // 4, MOST_LINE]))
        return damaged(rng, b"\n".join(lines)) if rng.random() < 0.5 else b"\n".join(lines)

    def read(path: Path) -> Any:
        found = read_lines(path)
        if not found or any("\n" in item or "\0" in item or not item.strip("\r") for item in found):
            raise Finding("an item that is none")
        return found

    return file_target(folder / "items", generate, read, (ShoalError,))

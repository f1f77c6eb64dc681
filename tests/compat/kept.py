"""Reads a kept run with today's verbs and goes on with it to its end.

    python -m tests.compat.kept FOLDER OUT.json NAME …      started by `looked_at`, in the environment `SAME_BITS`

Everything is done as a person does it who has brought the folder from another machine: `ps`, `report`, `checkpoint
verify`, `sample`, then `resume` (for a swarm `join`, for a model cut over peers the command that began it). Workers are
forked from this process instead of executed (tests/warm.py), which is the only difference.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.compat.bits import LIMIT_S, ROOT, SAME_BITS

FOLDER = Path(__file__).with_name("kept")
MADE_AT = Path("/tmp/shoal-kept")  # where all kept runs say that their data lies
SAMPLE = ["--prompt", "the", "--temperature", "0", "--max-tokens", "16", "--json"]
SHOWN = ("status", "step", "total", "attempts", "identity", "final_loss", "final_eval_loss", "digest")
Row = dict[str, Any]


def looked_at(names: Iterable[str], folder: Path = FOLDER) -> dict[str, Row]:
    with tempfile.TemporaryDirectory(prefix="shoal-kept-") as there:
        out = Path(there) / "rows.json"
        command = [sys.executable, "-m", "tests.compat.kept", str(folder), str(out), *names]
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **SAME_BITS}, capture_output=True, text=True, timeout=LIMIT_S
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return dict(json.loads(out.read_text()))


def unpack(name: str, folder: Path, workspace: Path) -> None:
    for archive in ("data", name):
        with tarfile.open(folder / f"{archive}.tar.xz") as tar:
            tar.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.2 has none
            tar.extractall(workspace)


def look(name: str, workspace: Path) -> Row:
    if name == "exported":
        return {"sample": sampled("--weights", str(workspace / "exported"))}
    if name == "stages":
        found = {"report": _report(str(workspace / "stages" / "stage-1-1"), workspace), "resume": _cut(workspace)}
        stages = [str(workspace / "stages" / f"stage-{n}-1") for n in (1, 2)]
        said("checkpoint", "join", *stages, str(workspace / "runs" / "whole"))
        told = json.loads(said("checkpoint", "verify", stages[0], "--json"))
        return {**found, "verified": _verdicts(told), "sample": sampled(str(workspace / "runs" / "whole"))}
    there = ["--workspace", str(workspace)]
    (row,) = [r for r in json.loads(said("ps", "--json", *there)) if r["name"] == name]
    found: Row = {"ps": {key: row[key] for key in ("status", "step", "total")}, "report": _report(name, workspace)}
    checked = json.loads(said("checkpoint", "verify", name, "--json", *there))
    found["verified"] = _verdicts(checked)
    found["sample"] = sampled(name, "--tokenizer", "byte", *there)  # its data is not where it was
    found["resume"] = _joined(name, workspace) if name == "swarm" else _resumed(name, workspace)
    return found


def _verdicts(checked: list[Row]) -> list[Row]:
    return [{key: one[key] for key in ("name", "good", "wrong")} for one in checked]


def said(*argv: str) -> str:
    """What a verb prints."""
    from shoal.cli.main import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main(list(argv))
    assert code == 0, f"{argv} left with {code}: {out.getvalue()}"
    return out.getvalue()


def sampled(*of: str) -> str:
    return str(json.loads(said("sample", *of, *SAMPLE, "--device", "cpu"))["text"])


def _report(run: str, workspace: Path) -> Row:
    told = json.loads(said("report", run, "--json", "--no-png", "--workspace", str(workspace)))
    return {key: told[key] for key in SHOWN}


def _resumed(name: str, workspace: Path) -> Row:
    data = workspace / "data"
    moved = [f"data.train={data / 'train'}"]
    if name == "experts":  # it was finished
        moved += [f"data.eval={data / 'eval'}", "train.steps=12", "train.schedule.prolong=keep"]
    journal = workspace / "runs" / name / "journal.jsonl"
    before = _size(journal)
    told = said("resume", name, *moved, "--workspace", str(workspace))
    return {"said": told.splitlines()[0] if told else "", **_since(journal, before)}


def _joined(name: str, workspace: Path) -> Row:
    """A peer starts again by its name, and takes no other values: where its data lies now is written into its file."""
    run_dir = workspace / "runs" / name
    spec = run_dir / "run.yaml"
    spec.write_text(spec.read_text().replace(str(MADE_AT), str(workspace)))
    before = _size(run_dir / "journal.jsonl")
    said("swarm", "join", name, "--tcp-only", "--listen", "127.0.0.1", "--workspace", str(workspace))
    return _since(run_dir / "journal.jsonl", before)


def _cut(workspace: Path) -> Row:
    """All stages, by the command that began them; the run file stands beside them."""
    from shoal.stages.__main__ import main

    folder = workspace / "stages"
    spec = folder / "run.yaml"
    spec.write_text(spec.read_text().replace(str(MADE_AT), str(workspace)))
    journals = [folder / f"stage-{stage}-1" / "journal.jsonl" for stage in (1, 2)]
    before = [_size(journal) for journal in journals]
    code = main(["local", str(spec), "--counts", "1,1", "--folder", str(folder)])
    assert code == 0, (folder / "stage-2-1" / "log").read_text()[-2000:]
    first, second = (_since(journal, size) for journal, size in zip(journals, before, strict=True))
    return {**first, "digest": [first["digest"], second["digest"]]}


def _size(journal: Path) -> int:
    return len(_records(journal))


def _since(journal: Path, before: int) -> Row:
    """What a journal has been told after its first `before` records."""
    new = _records(journal)[before:]
    steps = [r for r in new if r["kind"] == "step"]
    ends = [r for r in new if r["kind"] == "finished"]
    return {
        "steps": [r["step"] for r in steps],
        "losses": [float(r["loss"]).hex() for r in steps],
        "norms": [float(r["grad_norm"]).hex() for r in steps],
        "evals": [[r["step"], float(r["loss"]).hex()] for r in new if r["kind"] == "eval"],
        "digest": ends[-1]["digest"] if ends else None,
    }


def _records(journal: Path) -> list[Row]:
    from shoal.journal.journal import records

    return records(journal)


def main(folder: Path, out: Path, names: list[str]) -> None:
    import torch

    torch.set_num_threads(1)
    from tests import warm

    if warm.possible():
        from shoal.checkpoint import persister  # noqa: F401  # imported here once, not by each that is started
        from shoal.stages import __main__ as stage_peer  # noqa: F401
        from shoal.swarm.trainer import worker as swarm_worker  # noqa: F401
        from shoal.train import worker  # noqa: F401
        from tests.ranks import _warm

        _warm()
        subprocess.Popen = warm.Warm  # type: ignore[misc]
    found = {}
    for name in names:
        with tempfile.TemporaryDirectory(prefix="shoal-kept-") as workspace:
            unpack(name, folder, Path(workspace))
            found[name] = look(name, Path(workspace))
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])

"""Makes the kept runs: small runs of every driver as this tree writes them, each an archive beside this file.

    python -m tests.compat.make FOLDER              FOLDER: tests/compat/kept
    python -m tests.compat.make --expect FOLDER     the runs stay; what is found in them is written down anew

Runs keep absolute paths of their data, and the name of the machine. So they are made in one neutral place, by a copy of
the package there, on a machine that calls itself `somewhere`; what holds a name or path of this machine all the same is
refused. `kept.json` says at which commit it was done, and what `tests.compat.kept` found in each run and by going on
with it. Where a run was stopped depends on the machine; what it comes to in the end does not.
"""

from __future__ import annotations

import argparse
import getpass
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from shoal.journal.journal import records
from tests.compat import kept
from tests.compat.bits import ROOT, SAME_BITS, here
from tests.patience import Stopwatch

PLACE = kept.MADE_AT
STEPS, STOP_AT = 8, 4
SLOWLY = {"SHOAL_FAULT": "step:pace=0.7"}  # so that there is time to stop it half-way
NEUTRAL = """\
import platform, socket
socket.gethostname = lambda: "somewhere"
platform.node = lambda: "somewhere"
platform.platform = lambda *a, **k: "Linux"
"""
BASE: dict[str, Any] = {
    "model": {"dim": 16, "layers": 2, "heads": 2, "ffn_dim": 32, "tie_embeddings": True},
    "data": {"train": str(PLACE / "data" / "train"), "seq_len": 32},
    "train": {"steps": STEPS, "batch": 8, "optimizer": {"lr": 1e-2}, "schedule": {"warmup_steps": 2}},
    "checkpoint": {"every": 3, "keep": 1},
    "resources": {"device": "cpu", "threads": 1, "processes": 1},
    "track": {"mlflow": False},
}
ONE = ("dp_replicate", "dp_shard", "tp", "pp")


def plain(**mesh: int) -> dict[str, Any]:
    return {**BASE, "mesh": {**dict.fromkeys(ONE, 1), "micro_batch": 2, **mesh}}


TWO = {**BASE["resources"], "processes": 2}
RUNS: dict[str, dict[str, Any]] = {
    "plain": {**plain(dp_shard=2), "resources": TWO},
    "experts": {
        **plain(),
        "model": {
            **BASE["model"],
            "family": "qwen3_moe",
            "qk_norm": True,
            "tie_embeddings": False,
            "experts": {"count": 4, "top_k": 2, "ffn_dim": 16},
        },
        "data": {**BASE["data"], "eval": str(PLACE / "data" / "eval")},
        "eval": {"every": 4, "windows": 4},
    },
    "islands": {**plain(), "fleet": {"islands": 2, "shards": 4, "deterministic": True}},
    "torchrun": {**plain(dp_shard=2), "resources": TWO},
    "swarm": {
        **{key: value for key, value in plain().items() if key != "checkpoint"},
        "train": {**BASE["train"], "steps": 40},
        "swarm": {"peers": 1, "batch": 8, "round": "1 s", "snapshot_every": 1},
    },
    "stages": {
        **{key: value for key, value in BASE.items() if key not in ("checkpoint", "track")},
        "model": {**BASE["model"], "tie_embeddings": False},
        "train": {**BASE["train"], "steps": 20},
        "mesh": {"micro_batch": 2},
        "swarm": {"stages": {"count": 2, "activations": "fp32", "save_every": 5}},
    },
}


def main(out: Path) -> None:
    if PLACE.exists():
        sys.exit(f"{PLACE} is there already: runs are made in that folder, so move it away.")
    PLACE.mkdir(parents=True)
    try:
        shutil.copytree(ROOT / "src" / "shoal", PLACE / "src" / "shoal", ignore=shutil.ignore_patterns("__pycache__"))
        (PLACE / "src" / "sitecustomize.py").write_text(NEUTRAL)
        prepare_data()
        for name, spec in RUNS.items():
            (PLACE / f"{name}.yaml").write_text(yaml.safe_dump({"name": name, **spec}, sort_keys=False))
        made()
        out.mkdir(parents=True, exist_ok=True)
        for file in out.iterdir():
            file.unlink()
        for name in (*RUNS, "exported"):
            pack(name, out / f"{name}.tar.xz")
        pack("data", out / "data.tar.xz")
    finally:
        shutil.rmtree(PLACE)
    expect(out)
    for file in sorted(out.iterdir()):
        print(f"{file.stat().st_size:8,} bytes  {file.name}")


def expect(out: Path) -> None:
    """`made_at`: the commit whose files they are; `commit`: the one that found this in them."""
    file = out / "kept.json"
    now = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    made_at = json.loads(file.read_text())["made_at"] if file.exists() else now
    runs = kept.looked_at([*RUNS, "exported"], out)
    about = {"made_on": here(), "made_at": made_at, "commit": now, "runs": runs}
    file.write_text(json.dumps(about, indent=1) + "\n")


def made() -> None:
    workspace = ["--workspace", str(PLACE)]
    half_way(["shoal", "train", "plain.yaml", *workspace], steps("plain"))
    done(["shoal", "train", "experts.yaml", *workspace])
    half_way(["shoal", "train", "islands.yaml", *workspace], steps("islands"))
    torchrun = [
        "torch.distributed.run",
        "--standalone",
        "--local-addr",
        "127.0.0.1",
        "--nproc-per-node",
        "2",
        "-m",
        "shoal.train",
    ]
    half_way([*torchrun, "torchrun.yaml"], steps("torchrun"))
    alone = ["--tcp-only", "--listen", "127.0.0.1", "--name", "one"]
    half_way(["shoal", "swarm", "create", "swarm.yaml", *alone, *workspace], steps("swarm", 8))
    peers = ["shoal.stages", "local", "stages.yaml", "--counts", "1,1", "--folder", str(PLACE / "stages")]
    (PLACE / "stages").mkdir()
    half_way(peers, lambda: taken(PLACE / "stages" / "stage-1-1" / "journal.jsonl") >= 6, number=signal.SIGINT)
    (PLACE / "stages.yaml").rename(PLACE / "stages" / "run.yaml")
    done(["shoal", "checkpoint", "export", "plain", str(PLACE / "exported"), *workspace])


def prepare_data() -> None:
    """Lines of words that follow each other by rule, as bytes."""
    words = ("the", "whale", "swims", "under", "blue", "water", "and", "sings", "while", "small", "fish", "turn")
    lines = [" ".join(words[(i * 7 + j * (1 + i % 5)) % len(words)] for j in range(4 + i % 9)) for i in range(160)]
    (PLACE / "text.txt").write_text("\n".join(lines) + "\n")
    done(["shoal", "data", "prepare", "text.txt", "--per-line", "--out", str(PLACE / "data"), "--eval-fraction", "0.1"])


def _start(command: Sequence[str], **env: str) -> subprocess.Popen[str]:
    kept_out = ("SHOAL_", "MLFLOW_")
    clean = {key: value for key, value in os.environ.items() if not key.startswith(kept_out)}
    clean |= {**SAME_BITS, "PYTHONPATH": str(PLACE / "src"), "PYTHONDONTWRITEBYTECODE": "1", **env}
    line = [sys.executable, "-m", *command]
    return subprocess.Popen(line, cwd=PLACE, env=clean, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def done(command: Sequence[str]) -> None:
    process = _start(command)
    said, _ = process.communicate(timeout=900)
    assert process.returncode == 0, f"{command} left with {process.returncode}:\n{said}"


def half_way(command: Sequence[str], enough: Callable[[], bool], number: int = signal.SIGTERM) -> None:
    process, watch = _start(command, **SLOWLY), Stopwatch()
    while not enough() and process.poll() is None:
        assert watch.quiet_s() < 600, f"{command} does not get on"
        time.sleep(0.02)
    process.send_signal(number)
    said, _ = process.communicate(timeout=600)
    assert process.returncode != 0, f"{command} was done before it was stopped:\n{said}"
    print(f"{' '.join(command[:3])}: left with {process.returncode}")


def steps(name: str, least: int = STOP_AT) -> Callable[[], bool]:
    return lambda: taken(PLACE / "runs" / name / "journal.jsonl") >= least


def taken(journal: Path) -> int:
    return max((r["step"] for r in records(journal) if r["kind"] == "step"), default=0) if journal.exists() else 0


def pack(name: str, archive: Path) -> None:
    """All files of a run, in order and without times or owners."""
    folder = PLACE / name if name in ("data", "stages", "exported") else PLACE / "runs" / name
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip().encode()
    with tarfile.open(archive, "w:xz", preset=9, format=tarfile.PAX_FORMAT) as tar:
        for file in sorted(p for p in folder.rglob("*") if p.is_file() and not p.is_socket()):
            where = str(file.relative_to(PLACE))
            data = file.read_bytes().replace(boot, b"0" * len(boot))  # islands tell hosts apart by it
            data = neutral(data) if file.suffix == ".log" or file.name == "log" else data
            refuse_names_of_this_machine(where, data)
            info = tarfile.TarInfo(where)
            info.size, info.mode = len(data), 0o600 if file.stat().st_mode & 0o077 == 0 else 0o644
            tar.addfile(info, io.BytesIO(data))


def neutral(log: bytes) -> bytes:
    """A log is text for people: where this machine's paths stand in a warning, others may stand."""
    for place in (sys.prefix, sys.base_prefix, str(ROOT), str(Path(os.__file__).parent)):
        log = log.replace(place.encode(), b"/somewhere")
    return log


def refuse_names_of_this_machine(where: str, data: bytes) -> None:
    names = {socket.gethostname(), str(ROOT), sys.prefix, str(Path.home()), str(Path(sys.executable).parent)}
    names |= {getpass.getuser()} - {"root"}
    for name in names:
        if len(name) > 3 and name.encode() in data:
            sys.exit(f"{where} holds {name}, which is this machine's.")
    if found := re.search(rb"/(work|home|Users|root)/[\w.-]+", data):
        sys.exit(f"{where} holds {found[0].decode()}, which is a path of a machine.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.compat.make")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--expect", action="store_true", help="the runs stay; what is found in them is written anew")
    asked = parser.parse_args()
    (expect if asked.expect else main)(asked.folder.resolve())

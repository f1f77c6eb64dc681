"""`make demo`: prepare real text, train with two processes, kill one on purpose, recover, report, sample.

Everything goes through the command line a user has; the only thing this script does by itself is the murder.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from shoal.journal import journal

ROOT = Path(__file__).resolve().parent.parent
WORKSPACE = "demo-workspace"
RUN_FILE = "examples/demo.yaml"
KILL_AT = 90  # of 160 steps, and between two checkpoints, so that some work is lost
BOLD, DIM, RESET = ("\033[1m", "\033[2m", "\033[0m") if sys.stdout.isatty() else ("", "", "")


def main() -> None:
    os.chdir(ROOT)
    began = time.monotonic()
    shutil.rmtree(WORKSPACE, ignore_errors=True)
    os.makedirs(WORKSPACE)
    texts = "examples/text/moby-dick.txt examples/text/state-of-the-union.jsonl"

    say("1. Train a tokenizer on the shipped text, and turn the text into token shards")
    shoal(f"data tokenizer {texts} --vocab-size 2048 --out {WORKSPACE}/tokenizer.json")
    shoal(
        f"data prepare {texts} --separator '\\n\\n\\n' --tokenizer {WORKSPACE}/tokenizer.json "
        f"--eval-fraction 0.05 --out {WORKSPACE}/data"
    )

    say("2. Train a small Llama with two processes; one is killed half-way (kill -9)")
    killer = threading.Thread(target=kill_a_worker_half_way, daemon=True)
    killer.start()
    shoal(f"train {RUN_FILE} --workspace {WORKSPACE}")

    say("3. What happened, and where the time went")
    shoal(f"report demo --workspace {WORKSPACE}")

    say("4. What the model has learned to say")
    shoal(f"sample demo --workspace {WORKSPACE} --prompt 'The whale' --max-tokens 80 --temperature 0.8")

    say(f"Done in {time.monotonic() - began:.0f} s. Where to look next")
    print(
        f"  {WORKSPACE}/runs/demo/            the run: resolved spec, journal, logs, checkpoints, curves\n"
        f"  .venv/bin/shoal ps --workspace {WORKSPACE}\n"
        f"  .venv/bin/shoal logs demo --workspace {WORKSPACE} -n 20\n"
        f"  .venv/bin/mlflow ui --backend-store-uri sqlite:///{WORKSPACE}/mlflow.db\n"
        f"  .venv/bin/shoal init pretrain my-run.yaml     a run file of your own; docs/guide/ explains it"
    )


def kill_a_worker_half_way() -> None:
    """Waits until half of the steps are committed, then kills rank 1 as a failing machine would."""
    path = Path(WORKSPACE) / "runs" / "demo" / "journal.jsonl"
    pids: list[int] = []
    while True:
        for record in journal.records(path) if path.exists() else []:
            if record["kind"] == "attempt":
                pids = record["pids"]
            if record["kind"] == "step" and record["step"] >= KILL_AT:
                os.kill(pids[1], signal.SIGKILL)
                return
        time.sleep(0.2)


def say(text: str) -> None:
    print(f"\n{BOLD}{text}{RESET}", flush=True)


def shoal(arguments: str) -> None:
    print(f"{DIM}$ shoal {arguments}{RESET}", flush=True)
    code = subprocess.call([sys.executable, "-m", "shoal", *shlex.split(arguments)])
    if code:
        sys.exit(code)


if __name__ == "__main__":
    main()

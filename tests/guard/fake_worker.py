"""A worker without a model: takes steps, saves, obeys signals and fails as RUN_DIR/script.json says. Run by path.

script.json: {"steps": 20, "save_every": 5, "faults": [{"attempt": 0, "rank": 1, "step": 7, "do": "deaf"}]}
A fault happens before its step (or after the last one), in one attempt or, if it names none, in all. `fail` knows how.
"""

import builtins
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from shoal.journal.journal import Journal

RUN = Path(sys.argv[1])
# Beside the runs when `shoal train` makes the run directory itself.
PLAN_FILES = (RUN / "script.json", RUN.parent.parent / f"{RUN.name}.script.json")
PLAN = json.loads(next(file for file in PLAN_FILES if file.exists()).read_text())
RANK, WORLD, ATTEMPT = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "SHOAL_ATTEMPT"))
BARRIER = RUN / f"barrier-{ATTEMPT}"
stop = False


def hear(number: int, frame: object) -> None:
    global stop
    stop = True


def exchange(step: int) -> bool:
    """The collective of a step: waits for every rank, and tells whether any of them was told to stop.

    As in a real one nothing is heard while waiting, and the death of a peer is an error.
    """
    BARRIER.mkdir(exist_ok=True)
    (BARRIER / f"{step}-{RANK}-{int(stop)}").touch()
    waiting, any_stops = set(range(WORLD)), False
    while waiting:
        for rank in sorted(waiting):
            pid = RUN / f"pid-{ATTEMPT}-{rank}"
            gone = pid.exists() and pid.read_text() and not Path("/proc", pid.read_text()).exists()
            flags = [flag for flag in (0, 1) if (BARRIER / f"{step}-{rank}-{flag}").exists()]
            if flags:
                waiting.remove(rank)
                any_stops |= flags == [1]
            elif gone:
                raise ConnectionError("Connection closed by peer")
        time.sleep(0.002)
    return any_stops


def save(step: int) -> None:
    folder = RUN / "checkpoints" / f"step-{step:08d}-term-{ATTEMPT}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").write_text("{}")


def newest() -> int:
    return max((int(p.parent.name.split("-")[1]) for p in RUN.glob("checkpoints/*/manifest.json")), default=0)


def fail(fault: dict) -> None:
    if "after_s" in fault:
        time.sleep(fault["after_s"])
    if "say" in fault:
        print(fault["say"], file=sys.stderr)
    match fault["do"]:
        case "signal":
            os.kill(os.getpid(), fault["signal"])
            time.sleep(5)
        case "stop":  # goes on when somebody says so
            os.kill(os.getpid(), signal.SIGSTOP)
        case "busy":
            while time.process_time() < fault["cpu_s"]:
                pass
        case "exit":
            os._exit(fault["code"])
        case "raise":
            raise getattr(builtins, fault.get("kind", "ValueError"))(*filter(None, [fault["text"]]))
        case "deaf":  # hears no signal, as in a collective whose peer is gone
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            (RUN / f"deaf-{RANK}").touch()
            time.sleep(600)
        case "child":  # leaves a process of its own behind
            child = subprocess.Popen(["sleep", "600"])
            (RUN / f"child-{RANK}").write_text(str(child.pid))


def misbehave(step: int) -> None:
    for fault in PLAN["faults"]:
        if fault["rank"] == RANK and fault["step"] == step and fault.get("attempt", ATTEMPT) == ATTEMPT:
            fail(fault)


def main() -> int:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, hear)
    journal = Journal(RUN / "journal.jsonl") if RANK == 0 else None
    (RUN / f"pid-{ATTEMPT}-{RANK}").write_text(str(os.getpid()))
    first = newest()
    (RUN / f"env-{ATTEMPT}-{RANK}.json").write_text(json.dumps(dict(os.environ)))
    if journal:
        journal.append("start", attempt=ATTEMPT, step=first, world=WORLD)
    for step in range(first + 1, PLAN["steps"] + 1):
        misbehave(step)
        if exchange(step):
            time.sleep(PLAN.get("save_s", 0.0))
            if "unsaved" in PLAN:
                print(PLAN["unsaved"], file=sys.stderr)
                return 75
            save(step - 1)
            print(f"shoal: stopped after step {step - 1}", file=sys.stderr)
            return 143
        time.sleep(PLAN["step_s"])
        if journal:
            now = time.time()
            times = {"begin": now - PLAN["step_s"], "time": {"data_s": 0.0}}
            journal.append("step", attempt=ATTEMPT, step=step, loss=1.0 / step, tokens=100, lr=0.1, **times)
            if step % PLAN["save_every"] == 0:
                save(step)
    misbehave(PLAN["steps"] + 1)
    if journal:
        save(PLAN["steps"])
        journal.append("finished", attempt=ATTEMPT, step=PLAN["steps"], digest="abc")
    return 0


if __name__ == "__main__":
    sys.exit(main())

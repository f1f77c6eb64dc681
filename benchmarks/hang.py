"""Claim: a rank that is stopped, or waits for ever, is named within 10 s or 3 steps, and nobody else ever is.

A real run under its supervisor. Again and again, at a random moment, one of its ranks is stopped with SIGSTOP, or is
made to sleep in a read of data, to deadlock in the model's forward pass, or to leave a collective out; when it has been
named it is let go on (`guard.on_hang: wait`), so that one run does for all of them. Right is: this rank, its phase, and
its stack shows where. `--soak MINUTES` is the other half: the same run, compiled, with evaluations, saves to a slow
disk, data that come slowly, short stops and a busy machine; each hang that is named is a false alarm.
`--traces N` needs no processes: N healthy runs and as many with each fault, generated and watched in virtual time
(tests/guard/traces.py). No healthy one may be ended, each broken rank is named within 10 s or 3 steps, and one that
computes for ever is told and not ended.
Peers, by their documents: gloo and NCCL give up on a collective after 10 or 30 minutes and name the ranks that waited.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

KINDS = {"stop": None, "data": "data", "forward": "forward", "collective": "clip"}  # what is done → the phase to name
SLOW_S = 12.0  # of what is slow and no hang: longer than the limit for a step


# The worker: the real one, with a trap in each of the places


def trapped(control: Path, rank: int, place: str) -> None:
    """Waits here for as long as a file says so; writes down since when."""
    trap = control / f"{place}-{rank}"
    if trap.exists():
        (control / f"in-{place}-{rank}").write_text(str(time.time()))
        while trap.exists():
            time.sleep(0.05)
        (control / f"in-{place}-{rank}").unlink()


def before(owner: Any, name: str, what: Callable[[], None]) -> None:
    real = getattr(owner, name)

    def first_that(*args: Any, **named: Any) -> Any:
        what()
        return real(*args, **named)

    setattr(owner, name, first_that)


def a_slow_disk() -> None:
    """Reads a little, for longer than a step may take."""
    with open("/dev/zero", "rb", buffering=0) as disk:
        end = time.monotonic() + SLOW_S
        while time.monotonic() < end:
            disk.read(1 << 14)
            time.sleep(0.2)


def worker(run_dir: Path, control: Path, soak: bool) -> int:
    from shoal.journal.pulse import Pulse

    pulse = Pulse.begin()
    from shoal.data.feed import Feed
    from shoal.journal.rundir import RunDir
    from shoal.model.decoder import Decoder
    from shoal.parallel.place import Place
    from shoal.train import worker as real
    from shoal.train import writers
    from shoal.train.evaluate import Evaluator

    rank = int(os.environ["RANK"])
    if soak:
        chance = random.Random(rank)
        before(Feed, "assemble", lambda: a_slow_disk() if chance.random() < 0.003 else None)
        before(writers, "save", lambda: time.sleep(SLOW_S if rank else 0.0))
        before(Evaluator, "__call__", lambda: time.sleep(SLOW_S if rank else 0.0))
        # Not in the decoder: the compiler would see it.
        before(Place, "sum_on_device", lambda: time.sleep(5.0) if chance.random() < 0.001 else None)
    else:
        before(Feed, "assemble", lambda: trapped(control, rank, "data"))
        before(Decoder, "forward", lambda: trapped(control, rank, "forward"))
        before(Place, "sum_on_device", lambda: trapped(control, rank, "collective"))
    return real.main(RunDir(run_dir), pulse)


# The supervisor, in a process of its own


def supervised(run_dir: Path, control: Path, world: int, soak: bool) -> int:
    from shoal.guard.supervise import supervise
    from shoal.journal.rundir import RunDir
    from shoal.spec import load

    me = [sys.executable, str(Path(__file__).resolve())]
    command = [*me, "--worker", str(run_dir), str(control), str(int(soak))]
    where = RunDir(run_dir)
    return supervise(where, load(where.spec_file).run, world, command=command)


class Run:
    def __init__(self, scratch: Path, world: int, soak: bool) -> None:
        from tests.train.tiny import make_data, make_run

        from shoal.decide.auto import decide
        from shoal.journal.rundir import RunDir
        from shoal.spec import dump

        changes: dict[str, Any] = {"train.steps": 10_000_000, "train.batch": 12, "guard": {"on_hang": "wait"}}
        if soak:
            data = str(make_data(scratch / "held-out", documents=20, seed=1))
            changes |= {"train.compile": True, "data.eval": data, "eval.every": 150, "checkpoint.every": 100}
        self.control, self._journal = scratch / "control", scratch / "runs" / "tiny" / "journal.jsonl"
        self.control.mkdir()
        where = RunDir.of("tiny", scratch)
        where.path.mkdir(parents=True)
        run = decide(make_run(make_data(scratch / "data"), **changes), scratch, world).run
        where.spec_file.write_text(dump(run))
        command = [sys.executable, str(Path(__file__).resolve()), "--supervise", str(where.path), str(self.control)]
        log = open(scratch / "supervisor.log", "w")  # noqa: SIM115  # as long as the process
        self.process = subprocess.Popen(
            [*command, str(world), str(int(soak))], stdout=log, stderr=log, start_new_session=True
        )
        self._offset, self._records = 0, []

    def records(self, kind: str) -> list[dict[str, Any]]:
        from shoal.journal.journal import read

        if self._journal.exists():
            for record, after in read(self._journal, self._offset):
                self._records.append(record)
                self._offset = after
        return [r for r in self._records if r["kind"] == kind]

    def pids(self) -> list[int]:
        return list(self.records("attempt")[-1]["pids"])

    def until(self, happened: Callable[[], Any], within_s: float) -> Any:
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            if found := happened():
                return found
            if self.process.poll() is not None:
                raise SystemExit(f"the run ended by itself: {self.records('close')}")
            time.sleep(0.02)
        return None

    def end(self) -> None:
        self.process.send_signal(signal.SIGINT)
        time.sleep(1)
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()


def once(run: Run, kind: str, rank: int) -> tuple[float | None, str]:
    """(seconds until it was named, what is wrong with that)"""
    hangs, pid = len(run.records("hang")), run.pids()[rank]
    if kind == "stop":
        os.kill(pid, signal.SIGSTOP)
        since = time.time()
    else:
        (run.control / f"{kind}-{rank}").touch()
        entered = run.control / f"in-{kind}-{rank}"
        since = float(run.until(lambda: entered.exists() and entered.read_text(), 60))
    hang = run.until(lambda: run.records("hang")[hangs:], 60)
    steps = len(run.records("step"))
    if kind == "stop":
        os.kill(pid, signal.SIGCONT)
    else:
        (run.control / f"{kind}-{rank}").unlink()
    assert run.until(lambda: len(run.records("step")) > steps + 12, 120), "it does not go on"
    if not hang:
        return None, "not named"
    (hang,) = hang
    phase, shown = KINDS[kind], "\n".join([*hang["stack"], *hang["reader"]])
    wrong = [
        f"rank {hang['rank']} named" if hang["rank"] != rank else "",
        f"phase {hang['phase']}" if phase and hang["phase"] != phase else "",
        "no stack" if not hang["stack"] else "",
        "not in the stack" if phase and "trapped" not in shown else "",
        "the others are not told" if len(hang["others"]) != len(run.pids()) - 1 else "",
    ]
    return hang["t"] - since, ", ".join(w for w in wrong if w)


def campaign(scratch: Path, times: int, world: int, seed: int) -> bool:
    chance, run = random.Random(seed), Run(scratch, world, soak=False)
    results: dict[str, list[tuple[float | None, str]]] = {kind: [] for kind in KINDS}
    try:
        assert run.until(lambda: len(run.records("step")) > 20, 240), "it does not train"
        for i in range(times):
            kind = "stop" if i % 2 == 0 else chance.choice([k for k in KINDS if k != "stop"])
            rank = chance.randrange(world)
            time.sleep(chance.random())
            seconds, wrong = once(run, kind, rank)
            results[kind].append((seconds, wrong))
            print(f"  {kind} of rank {rank}: {seconds and round(seconds, 2)} s {wrong}", flush=True)
        lengths = [r["t"] - r["begin"] for r in run.records("step")]
        stragglers, restarts = len(run.records("straggler")), len(run.records("failure"))
    finally:
        run.end()
    step_s = statistics.median(lengths)
    bar_s = max(10.0, 3 * step_s)
    print(f"\n{'what':<12} {'times':>6} {'right':>6} {'median s':>9} {'most s':>7}")
    for kind, of_kind in results.items():
        named = [s for s, _ in of_kind if s is not None]
        if of_kind:
            right = sum(not wrong for _, wrong in of_kind)
            median, most = (statistics.median(named), max(named)) if named else (0.0, 0.0)
            print(f"{kind:<12} {len(of_kind):>6} {right:>6} {median:>9.2f} {most:>7.2f}")
    everything = [r for of_kind in results.values() for r in of_kind]
    named = [s for s, _ in everything if s is not None]
    right = sum(not wrong for _, wrong in everything)
    median, most = statistics.median(named), max(named)
    print(f"named correctly {right} of {len(everything)}, seconds median {median:.2f} / max {most:.2f}", end=" ")
    print(f"({world} processes, steps of {1000 * step_s:.0f} ms; {restarts} failures, {stragglers} stragglers told)")
    held = right == len(everything) and most <= bar_s
    print(f"bar: all of them, within {bar_s:.0f} s:", "held" if held else "MISSED")
    return held


def soak(scratch: Path, minutes: float, world: int, seed: int) -> bool:
    chance, run = random.Random(seed), Run(scratch, world, soak=True)
    stops = 0
    end = time.monotonic() + 60 * minutes
    try:
        while time.monotonic() < end:
            run.until(lambda: run.records("attempt"), 60)
            time.sleep(chance.uniform(2, 10))
            pid = chance.choice(run.pids())
            os.kill(pid, signal.SIGSTOP)  # a short one is no hang
            time.sleep(chance.uniform(0.5, 3.0))
            os.kill(pid, signal.SIGCONT)
            stops += 1
            if chance.random() < 0.3:
                hog = threading.Thread(target=busy, args=(chance.uniform(1, 4),))
                hog.start()
                hog.join()
        kinds = ("step", "eval", "checkpoint")
        counts = ", ".join(f"{len(run.records(kind))} {kind}s" for kind in kinds)
        slowest = max((r["t"] - r["begin"] for r in run.records("step")), default=0.0)
        alarms = run.records("hang")
        failures = run.records("failure")
    finally:
        run.end()
    print(f"{minutes:g} minutes with {world} processes: {counts}, {stops} short stops, slowest step {slowest:.1f} s")
    for alarm in alarms:
        print(f"  false alarm: rank {alarm['rank']}: {alarm['evidence']}")
    print(f"false alarms: {len(alarms)}; failures: {len(failures)}")
    held = not alarms and not failures
    print("bar: none:", "held" if held else "MISSED")
    return held


CLASSES = ((0.01, 0.1), (0.1, 1.0), (1.0, 10.0), (10.0, 100.0), (100.0, 1800.0))  # seconds per step


def traces(times: int, seed: int) -> bool:
    """A table over generated runs: `times` healthy ones and as many with each fault, in each class of step length."""
    from tests.guard.traces import FAULTS, broken, healthy, play

    print(f"{'step':>14} {'healthy':>8} {'ended':>6} {'told slow':>10}", end="")
    print("".join(f"{fault:>12} {'latest':>16}" for fault in FAULTS), flush=True)
    held, began = True, time.monotonic()
    for least_s, most_s in CLASSES:
        well = [play(healthy(seed + i, least_s, most_s)) for i in range(times)]
        ended, slow = [o for o in well if o.killed], sum(bool(o.slow) for o in well)
        held = held and not ended
        print(f"{least_s:>6g} - {most_s:<4g}s {times:>8} {len(ended):>6} {slow:>10}", end="", flush=True)
        for fault in FAULTS:
            ill = [play(broken(seed + i, fault, least_s, most_s)) for i in range(times)]
            if fault == "live-lock":
                right = sum(o.killed is None and o.group.victim in {s.rank for s in o.slow} for o in ill)
                latest = "told, not ended"
            else:
                right = sum(o.right and o.after_s <= o.bar_s for o in ill)
                worst = max((o for o in ill if o.right), key=lambda o: o.after_s / o.bar_s)
                latest = f"{worst.after_s:.0f} of {worst.bar_s:.0f} s"
            held = held and right == times
            print(f"{right:>8}/{times:<3} {latest:>16}", end="", flush=True)
        print()
        for o in ended:
            print(f"  ended by mistake: {o.trace.about}: {o.killed.evidence if o.killed else ''}")
    print(f"{len(CLASSES) * times * (1 + len(FAULTS))} traces in {time.monotonic() - began:.0f} s")
    print("bar: no healthy one ended, all broken ones named within 10 s or 3 steps:", "held" if held else "MISSED")
    return held


def busy(seconds: float) -> None:
    """All cores, and a little more."""
    code = f"import time; end = time.time() + {seconds}\nwhile time.time() < end: pass"
    hogs = [subprocess.Popen([sys.executable, "-c", code]) for _ in range((os.cpu_count() or 1) + 1)]
    for hog in hogs:
        hog.wait()


def cost_of_a_mark() -> float:
    from shoal.journal.pulse import Pulse

    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        pulse, times = Pulse(Path(folder), 0), 20_000
        began = time.perf_counter()
        for step in range(times):
            pulse.mark("data", step)
        return 1e6 * (time.perf_counter() - began) / times


def main() -> int:
    if sys.argv[1:2] == ["--worker"]:
        code = worker(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4] == "1")
        sys.stderr.flush()
        os._exit(code)
    if sys.argv[1:2] == ["--supervise"]:
        return supervised(Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), sys.argv[5] == "1")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=30, help="how often something is made to hang")
    parser.add_argument("--world", type=int, default=3, help="processes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--soak", type=float, metavar="MINUTES", help="count false alarms instead")
    parser.add_argument(
        "--traces", type=int, metavar="N", help="generated runs in virtual time instead, N of each kind"
    )
    args = parser.parse_args()
    if args.traces:
        return 0 if traces(args.traces, args.seed) else 1
    scratch = Path(tempfile.mkdtemp(prefix="shoal-hang-"))
    try:
        if args.soak:
            return 0 if soak(scratch, args.soak, args.world, args.seed) else 1
        print(f"a mark costs {cost_of_a_mark():.1f} µs")
        return 0 if campaign(scratch, args.times, args.world, args.seed) else 1
    finally:
        if os.environ.get("KEEP"):
            print(f"kept: {scratch}")
        else:
            shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())

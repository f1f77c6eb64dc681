"""The means by which a run is broken: real signals, real limits, real bits. Each returns when it has done its part."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from shoal.checkpoint.find import published
from shoal.checkpoint.names import RANK_FILE, Name
from shoal.checkpoint.store import Folder
from shoal.drill.live import Live, gone
from shoal.drill.plan import Planned
from shoal.journal.journal import Record

BURST_S = 0.2  # of a slow worker: of each, it runs for a quarter
OOM_MIB = 64  # that a worker may still have
WOKEN_S = 5.0  # after a stopped worker was noticed: for what Shoal does about it
TOKENS, WIRE = "tokens", "wire.json"  # in the drill's folder


@dataclass
class Broken:
    """A fault as it was done."""

    kind: str
    victim: str
    step: int  # the last committed one
    t: float  # Unix time
    until: float = 0.0  # when the last of it was over
    island: int | None = None
    seen: float | None = None  # by this drill: the supervisor's end
    resumed: bool = False  # somebody had to start the run again
    note: str = ""


@dataclass
class Stage:
    live: Live
    folder: Path  # the drill's own
    memory: Path  # … in RAM
    pause_s: float
    gone: set[int] = field(default_factory=set)  # islands that were told to leave for good


def environment(folder: Path, pace_s: float) -> dict[str, str]:
    """The fault points that the workers look at while they run. `pace_s`: for each step, on top of what it takes."""
    (folder / TOKENS).mkdir(exist_ok=True)
    return {
        "SHOAL_FAULT": f"write:error=ENOSPC;step:memory={OOM_MIB}" + f";step:pace={pace_s:f}" * (pace_s > 0),
        "SHOAL_FAULT_TOKENS": str(folder / TOKENS),  # only while there is a token in it
        "SHOAL_FAULT_FILE": str(folder / WIRE),
    }


def do(planned: Planned, stage: Stage) -> Broken | None:
    """None where there was nobody to break."""
    stage.live.say(f"{planned.kind}, after step {stage.live.step}")
    broken = MEANS[planned.kind](planned, stage)
    if broken is not None:
        broken.until = broken.until or time.time()
    return broken


def _kill(planned: Planned, stage: Stage) -> Broken | None:
    return _signalled(planned, stage, signal.SIGKILL)


def _stop(planned: Planned, stage: Stage) -> Broken | None:
    """Woken up after it was noticed (it may be gone by then), or when the pause is over."""
    broken = _signalled(planned, stage, signal.SIGSTOP)
    if broken is None:
        return None
    noticed = stage.live.wait(lambda: _told(stage.live, broken), stage.pause_s)
    if noticed:
        stage.live.wait(lambda: bool(stage.live.of("failure", since=broken.t)), WOKEN_S)
    pid = stage.live.workers().get(broken.victim)
    if pid is not None and not stage.live.of("failure", since=broken.t):
        stage.live.signal(pid, signal.SIGCONT)
        broken.note = "woken up afterwards" if noticed else f"woken up after {stage.pause_s:g} s; nobody had noticed"
    broken.until = time.time()
    return broken


def _slow(planned: Planned, stage: Stage) -> Broken | None:
    broken = _signalled(planned, stage, signal.SIGSTOP)
    if broken is None:
        return None
    pid, end = stage.live.workers()[broken.victim], time.monotonic() + stage.pause_s
    try:
        while time.monotonic() < end and not stage.live.of("failure", since=broken.t):
            stage.live.signal(pid, signal.SIGSTOP)
            stage.live.wait(lambda: False, 0.75 * BURST_S)
            stage.live.signal(pid, signal.SIGCONT)
            stage.live.wait(lambda: False, 0.25 * BURST_S)
    finally:
        stage.live.signal(pid, signal.SIGCONT)
    broken.until = time.time()
    return broken


def _oom(planned: Planned, stage: Stage) -> Broken | None:
    """The worker asks for memory until it is refused: it may not have more than a little above what it has."""
    broken, pid = _victim(planned, stage)
    if broken is None or pid is None:
        return None
    token = _token(stage, f"step@{pid}")
    stage.live.wait(lambda: not token.exists(), stage.live.patience_s)
    if token.exists():
        token.unlink()
        return None
    return broken


def _nan(planned: Planned, stage: Stage) -> Broken | None:
    """The workers were told when they started (`plan.environment`): the batch comes when its step does, and may have
    come by now."""
    live, since = stage.live, time.time()

    def told() -> list[Record]:
        skipped = [r for r in live.of("skip") if int(r["batch"]) == planned.step]
        return skipped or live.of("rewind", "failure", since=since)

    live.wait(lambda: bool(told()) or live.step > planned.step + 1, live.patience_s)
    if not told():
        return None
    at = told()[0]
    return Broken("nan", f"batch {planned.step}", planned.step, float(at.get("begin") or at["t"]))


def _bitflip(planned: Planned, stage: Stage) -> Broken | None:
    """Everything that would start the workers again is held still while they are killed and the bits are flipped. Those
    who write their saves are killed too: one that finished the save in flight would leave a newer checkpoint, and a
    good one."""
    live = stage.live
    if not live.wait(lambda: len(_published(live)) > 1):
        return None
    guards = [live.pid, *live.agents().values()]
    for pid in guards:
        live.signal(pid, signal.SIGSTOP)
    try:
        broken = Broken("bitflip", "", live.step, time.time())
        workers, writers = list(live.workers().values()), live.writers()
        for pid in [*workers, *writers]:
            live.signal(pid, signal.SIGKILL, whole_session=True)
        if not live.wait(lambda: all(map(gone, [*workers, *writers])), live.patience_s):
            return None
        newest = _published(live)[-1]  # and none can come after it
        spoilt = _flip(live.run_dir.checkpoints / str(newest), planned.bit)
        for folder in _in_memory(stage):
            name = Name.of(folder.name)
            if name is not None and name.step >= newest.step:
                _flip(folder, planned.bit)
    finally:
        for pid in guards:
            live.signal(pid, signal.SIGCONT)
    broken.victim = f"{newest}/{spoilt}"
    return broken


def _disk_full(planned: Planned, stage: Stage) -> Broken | None:
    """The disk is full from the next save on, until that was noticed or the pause is over (a fault point: a file system
    of our own would need privileges)."""
    live, token = stage.live, _token(stage, "write@")
    live.wait(lambda: not token.exists())
    if token.exists():
        token.unlink()
        return None
    broken = Broken("disk-full", "the next save", live.step, time.time())

    def noticed() -> bool:
        tried = [r for r in live.of("warning", since=broken.t) if "is tried again" in str(r.get("text"))]
        token.touch()  # for whoever writes next
        return bool(tried or live.of("checkpoint_failed", since=broken.t))

    live.wait(noticed, stage.pause_s)
    token.unlink(missing_ok=True)
    return broken


def _partition(planned: Planned, stage: Stage) -> Broken | None:
    members = stage.live.members()
    if len(members) < 2:
        return None
    alone = members[int(planned.pick * len(members))]
    broken = Broken("partition", f"island {alone}", stage.live.step, time.time(), island=alone)
    _publish(stage.folder / WIRE, {"cut": [alone], "until": broken.t + stage.pause_s})
    stage.live.wait(lambda: False, stage.pause_s)
    (stage.folder / WIRE).unlink(missing_ok=True)
    broken.until = time.time()
    return broken


def _coordinator(planned: Planned, stage: Stage) -> Broken | None:
    live = stage.live
    if (members := live.members()) and (planned.bit % 2 or live.code is not None):  # or the supervisor is dead already
        broken = Broken("coordinator", f"island {members[0]}, rank 0", live.step, time.time(), island=members[0])
        pid = live.workers().get(broken.victim)
        return broken if pid is not None and live.signal(pid, signal.SIGKILL) else None
    broken = Broken("coordinator", "the supervisor", live.step, time.time())
    return broken if live.signal(live.pid, signal.SIGKILL) else None


def _preempt(planned: Planned, stage: Stage) -> Broken | None:
    live = stage.live
    if members := live.members():
        island = members[int(planned.pick * len(members))]
        broken = Broken("preempt", f"island {island}", live.step, time.time(), island=island)
        stage.gone.add(island)
        return broken if live.signal(live.agents()[island], signal.SIGTERM) else None
    broken = Broken("preempt", "the run", live.step, time.time())
    return broken if live.signal(live.pid, signal.SIGTERM) else None


MEANS: dict[str, Callable[[Planned, Stage], Broken | None]] = {
    "kill": _kill,
    "stop": _stop,
    "slow": _slow,
    "oom": _oom,
    "nan": _nan,
    "bitflip": _bitflip,
    "disk-full": _disk_full,
    "partition": _partition,
    "coordinator": _coordinator,
    "preempt": _preempt,
}


def _victim(planned: Planned, stage: Stage) -> tuple[Broken | None, int | None]:
    """One of the workers; of islands, of one that takes part."""
    live, members = stage.live, stage.live.members()
    workers = live.workers()
    if members:
        workers = {who: pid for who, pid in workers.items() if int(who.split(",")[0].split()[1]) in members}
    if not workers:
        return None, None
    who = sorted(workers)[int(planned.pick * len(workers))]
    island = int(who.split(",")[0].split()[1]) if members else None
    return Broken(planned.kind, who, live.step, time.time(), island=island), workers[who]


def _signalled(planned: Planned, stage: Stage, number: signal.Signals) -> Broken | None:
    broken, pid = _victim(planned, stage)
    return broken if broken is not None and pid is not None and stage.live.signal(pid, number) else None


def _token(stage: Stage, name: str) -> Path:
    """Gone when a worker has taken it (shoal.checkpoint.fault_points)."""
    token = stage.folder / TOKENS / name
    token.touch()
    return token


def _told(live: Live, broken: Broken) -> bool:
    lost = [r for r in live.of("epoch", since=broken.t) if str(broken.island) in (r.get("left") or {})]
    return bool(lost or live.of("failure", "hang", since=broken.t))


def _published(live: Live) -> list[Name]:
    """Checkpoints on disk that nobody has found bad, the newest last."""
    with contextlib.suppress(OSError):
        there = published(Folder(live.run_dir.checkpoints)) if live.run_dir.checkpoints.exists() else []
        return sorted(one.name for one in there if one.there and one.on_history and not one.quarantined)
    return []


def _in_memory(stage: Stage) -> list[Path]:
    return [path for path in stage.memory.rglob("step-*-term-*") if path.is_dir()]


def _flip(folder: Path, bit: int) -> str:
    """One bit of the second half of the largest rank file: of the numbers, not of the header."""
    files = [path for path in folder.iterdir() if RANK_FILE.fullmatch(path.name)]
    if not files:
        return "nothing"
    path = max(sorted(files), key=lambda p: p.stat().st_size)
    size = path.stat().st_size
    at = size // 2 + bit % max(1, size // 2)
    with open(path, "r+b") as f:
        f.seek(at)
        byte = f.read(1)[0]
        f.seek(at)
        f.write(bytes([byte ^ 1 << bit % 8]))
        f.flush()
        os.fsync(f.fileno())
    return path.name


def _publish(path: Path, value: object) -> None:
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(value))
    temporary.rename(path)

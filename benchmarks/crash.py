"""Claim: whoever dies, and whenever: the next start goes on from a checkpoint that is whole, and no older than the last
one that was known to be published.

A small trainer with the real saves (`tests/checkpoint/trainer.py`: two ranks, each with its persister) is killed with
-9 at every named point of a save: the process that is there, each that takes over from it, all processes at once, and
the machine (all processes, and what was in memory is gone too); saving in the background and at once, to a disk and to
a real S3 server (SeaweedFS). Then at random moments, again and again. Each time it is started again and judged
(`tests/checkpoint/crashes.py`): what it found, bit for bit; what is left behind. Disks that are full, slow, read-only
or gone and servers that die and return are `tests/checkpoint/test_saver.py`, which is run too.
Peers: torch.save to one file and torch's DCP into one folder, both overwritten by the next save, killed in the midst of
it: how often can neither the new nor the old state be read?
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
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

import torch  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from tests.checkpoint.crashes import STORM, Verdict, cases, cases_on_s3, judged, storm  # noqa: E402
from tests.services import s3_server  # noqa: E402

from shoal import checkpoint  # noqa: E402
from shoal.checkpoint import fault_points  # noqa: E402

NEW, OLD, NEITHER = "the new one", "the old one", "neither"
SHOAL = "Shoal, keep: 1"
MIB = 1 << 20


def campaign(scratch: Path, lives: int) -> list[Verdict]:
    verdicts = []
    for i, case in enumerate(cases()):
        verdicts.append(told(judged(case, scratch / str(i)), str(case)))
        shutil.rmtree(scratch / str(i))
    for seed in range(-(-lives // 25)):
        verdicts += [told(v, STORM) for v in storm(seed, scratch / f"storm-{seed}", min(25, lives))]
    return verdicts


def campaign_on_s3(scratch: Path) -> list[Verdict]:
    with s3_server(scratch / "seaweed") as server:
        server.make_bucket("runs")
        os.environ.update(server.environment)
        return [
            told(judged(case, scratch / f"s3-{i}", f"s3://runs/{i}"), str(case)) for i, case in enumerate(cases_on_s3())
        ]


def told(verdict: Verdict, what: str) -> Verdict:
    if not verdict.good:
        print(f"{what}: {verdict.wrong}", flush=True)
    return verdict


def table(verdicts: Iterable[Verdict]) -> None:
    kinds: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        kinds.setdefault(verdict.kind, []).append(verdict)
    print(f"\n{'kill -9':16}" + "".join(f"  {chr(ord('A') + i):>12}" for i in range(len(kinds))))
    for point in [*fault_points.POINTS, "nobody", "trainer 0", "trainer 1", "persister 0", "persister 1", "all"]:
        cells = []
        for of_kind in kinds.values():
            here = [v for v in of_kind if v.point == point]
            lost = max((v.lost for v in here), default=0)
            cells.append(f"{sum(v.good for v in here)}/{len(here)}, {lost:3}" if here else "")
        if any(cells):
            print(f"{point:16}" + "".join(f"  {cell:>12}" for cell in cells))
    print(
        "good/cases, most steps lost. A step takes 2 to 15 ms here, a save every fifth; at random: 5 ms, every 2 to 7."
    )
    for i, (kind, of_kind) in enumerate(kinds.items()):
        lost = statistics.mean(v.lost for v in of_kind)
        print(f"  {chr(ord('A') + i)}: {kind}: {sum(v.good for v in of_kind)} of {len(of_kind)}, {lost:.1f} steps lost")


# The peers


def state(value: float, mib: int = 64) -> dict[str, torch.Tensor]:
    return {f"t{i}": torch.full((mib * MIB // 32,), value) for i in range(8)}


def with_torch_save(folder: Path, value: float) -> None:
    torch.save(state(value), folder / "model.pt")


def of_torch_save(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "model.pt")


def with_dcp(folder: Path, value: float) -> None:
    dcp.save(state(value), storage_writer=dcp.FileSystemWriter(folder / "dcp", overwrite=True), no_dist=True)


def of_dcp(folder: Path) -> dict[str, torch.Tensor]:
    tensors = state(0)
    dcp.load(tensors, checkpoint_id=folder / "dcp", no_dist=True)
    return tensors


def with_shoal(folder: Path, value: float) -> None:
    checkpoint.save(folder / "shoal", int(value), state(value), {}, read_back="headers")
    checkpoint.prune(folder / "shoal", keep=1)


def of_shoal(folder: Path) -> dict[str, torch.Tensor]:
    tensors = state(0)
    assert checkpoint.restore(folder / "shoal", tensors)
    return tensors


PEERS: dict[str, tuple[Callable[[Path, float], None], Callable[[Path], dict[str, torch.Tensor]]]] = {
    "torch.save, one file": (with_torch_save, of_torch_save),
    "DCP, one folder": (with_dcp, of_dcp),
    SHOAL: (with_shoal, of_shoal),
}


def killed_in_the_midst(scratch: Path, peer: str, rounds: int) -> Counter[str]:
    """Saves twice, and is killed at a random moment of the second save: what can be read then?"""
    save, load = PEERS[peer]
    chance, outcomes = random.Random(0), Counter[str]()
    length_s = 0.0
    for i in range(rounds + 1):
        folder = scratch / f"{peer}-{i}"
        folder.mkdir()
        began, ended = os.pipe()
        pid = os.fork()
        if not pid:
            _quietly(lambda s=save, f=folder: s(f, 1))
            os.write(ended, b"x")
            _quietly(lambda s=save, f=folder: s(f, 2))
            os._exit(0)
        os.read(began, 1)
        at = time.perf_counter()
        if i:
            time.sleep(chance.uniform(0, length_s))
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        length_s = length_s or time.perf_counter() - at  # the first one is left alone
        if i:
            outcomes[_read(load, folder)] += 1
        os.close(began)
        os.close(ended)
        shutil.rmtree(folder)
    return outcomes


def _read(load: Callable[[Path], dict[str, torch.Tensor]], folder: Path) -> str:
    """In a process of its own: a torn file may crash it."""
    pid = os.fork()
    if not pid:
        status = 3

        def look() -> None:
            nonlocal status
            values = {float(v) for tensor in load(folder).values() for v in tensor.unique()}
            status = int(values.pop()) if len(values) == 1 else 3

        _quietly(look)
        os._exit(status)
    return {2: NEW, 1: OLD}.get(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), NEITHER)


def _quietly(work: Callable[[], object]) -> None:
    try:
        signal.alarm(60)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        warnings.simplefilter("ignore")
        work()
    except BaseException:
        return
    finally:
        signal.alarm(0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lives", type=int, default=50, help="that end at a random moment")
    parser.add_argument("--kills", type=int, default=40, help="in the midst of a save, for each peer")
    parser.add_argument("--no-s3", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        verdicts = campaign(scratch, args.lives)
        if not args.no_s3:
            verdicts += campaign_on_s3(scratch)
        peers = {peer: killed_in_the_midst(scratch, peer, args.kills) for peer in PEERS}
    table(verdicts)
    good = sum(verdict.good for verdict in verdicts)
    print(f"\n{len(verdicts)} deaths: {good} survived without losing what was published (bar: all)", flush=True)
    command = [sys.executable, "-m", "pytest", "tests/checkpoint/test_saver.py", *(["-m", "not cluster"] * args.no_s3)]
    hostile = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    print(
        "disks and servers that fail, zombies, signals: " + ("all hold" if not hostile.returncode else hostile.stdout)
    )
    title = f"killed in the midst of a save of 64 MiB, {args.kills} times"
    print(f"\n{title:49}" + "".join(f"{how:>14}" for how in (NEW, OLD, NEITHER)))
    for peer, outcomes in peers.items():
        print(f"  {peer:47}" + "".join(f"{outcomes[how]:>14}" for how in (NEW, OLD, NEITHER)))
    lost_by_us, worst = peers[SHOAL][NEITHER], max(outcomes[NEITHER] for outcomes in peers.values())
    print(f"nothing that can be read: Shoal {lost_by_us} of {args.kills}, the worst peer {worst}")
    return int(good < len(verdicts) or bool(hostile.returncode) or bool(lost_by_us))


if __name__ == "__main__":
    sys.exit(main())

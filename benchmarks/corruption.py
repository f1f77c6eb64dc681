"""Claim: whatever happens to the bytes of a checkpoint is noticed, and the newest good one is loaded, bit for bit.

Hundreds of damages are drawn by seed, on a disk and on a real S3 server (SeaweedFS): bit flips anywhere, truncations,
deletions, swaps between ranks, steps and terms, torn writes, foreign files, refused reads. Each is judged by what a
user sees: what is loaded, what is said, what is quarantined. What is harmless (leftovers of dead saves, zombies of
older terms, a lost ledger) must change nothing, and clean loads must raise no alarm.
Peer: torch's DCP, with the same bit flips at the same places of its files: how many does it load without a word?
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

import torch  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from tests.checkpoint import campaign, shelves  # noqa: E402
from tests.checkpoint.campaign import Tally  # noqa: E402
from tests.checkpoint.shelves import GOOD, Disk, History, InBucket, Shelf, empty, files_of, flipped, state  # noqa: E402
from tests.checkpoint.states import same_bits  # noqa: E402
from tests.services import s3_server  # noqa: E402

from shoal import checkpoint  # noqa: E402
from shoal.checkpoint import Name  # noqa: E402

RIGHT, WRONG, REFUSED = "loaded, and right", "loaded, and wrong, without a word", "refused"


def run_campaign(where: str, shelf: Shelf, history: History, damages: int, clean: int) -> Tally:
    tally, began = Tally(), time.perf_counter()
    campaign.judge(range(damages), shelf, history, campaign.damage, tally)
    campaign.judge(range(damages // 3), shelf, history, campaign.harmless, tally)
    campaign.clean_loads(clean, shelf, history, tally)
    print(f"{where}: {time.perf_counter() - began:.0f} s", flush=True)
    return tally


def flips(count: int, files: dict[str, int], seed: int) -> list[tuple[str, int]]:
    """(file, bit): the same places, as shares of all bytes, whatever the files are."""
    rng, table = random.Random(seed), []
    for _ in range(count):
        at, bit = int(rng.random() * sum(files.values())), rng.randrange(8)
        for name, size in sorted(files.items()):
            if at < size:
                table.append((name, 8 * at + bit))
                break
            at -= size
    return table


def outcome_of_flips(folder: Path, count: int, load: Callable[[], bool]) -> Counter[str]:
    """Flips one bit at a time in the files of a folder and loads it, in a process of its own: it may well crash."""
    sizes = {str(p.relative_to(folder)): p.stat().st_size for p in folder.rglob("*") if p.is_file()}
    outcomes: Counter[str] = Counter()
    for file, bit in flips(count, sizes, seed=1):
        data = (folder / file).read_bytes()
        (folder / file).write_bytes(flipped(data, bit))
        outcomes[_in_a_fork(load)] += 1
        (folder / file).write_bytes(data)
    return outcomes


def _in_a_fork(load: Callable[[], bool]) -> str:
    pid = os.fork()
    if not pid:
        status = 2
        try:
            signal.alarm(60)  # a damaged size may make it read for ever
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            status = 0 if load() else 1
        except BaseException:
            status = 2
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return {0: RIGHT, 1: WRONG}.get(status, REFUSED)


def compare_with_dcp(scratch: Path, count: int) -> tuple[Counter[str], Counter[str]]:
    """(Shoal, DCP): what becomes of the same bit flips in a checkpoint of the same state."""
    name = Name(50, 2)
    truth = state(name)
    checkpoint.save(scratch / "shoal", name.step, truth, {}, name.term, piece_bytes=8192)
    dcp.save(dict(truth), checkpoint_id=scratch / "dcp", no_dist=True)

    def load_ours() -> bool:
        tensors = empty()
        checkpoint.load(checkpoint.open_checkpoint(scratch / "shoal", name), tensors)
        return same_bits(tensors, truth)

    def load_dcp() -> bool:
        tensors = empty()
        dcp.load(tensors, checkpoint_id=scratch / "dcp", no_dist=True)
        return same_bits(tensors, truth)

    assert load_ours()
    assert load_dcp()
    ours = outcome_of_flips(scratch / "shoal" / str(name), count, load_ours)
    return ours, outcome_of_flips(scratch / "dcp", count, load_dcp)


def show(tallies: dict[str, Tally]) -> None:
    for title, of in (("damages", lambda t: t.tried), ("harmless", lambda t: t.harmless)):
        kinds = list(dict.fromkeys(kind for tally in tallies.values() for kind in of(tally)))
        print(f"\n{title:42}" + "".join(f"{where:>10}" for where in tallies))
        for kind in sorted(kinds):
            print(f"  {kind:40}" + "".join(f"{of(tally)[kind]:10}" for tally in tallies.values()))
        print(f"  {'all':40}" + "".join(f"{sum(of(tally).values()):10}" for tally in tallies.values()))
    print(f"\n{'clean loads':42}" + "".join(f"{tally.clean:10}" for tally in tallies.values()))
    print(f"{'missed, or alarmed for nothing':42}" + "".join(f"{len(tally.missed):10}" for tally in tallies.values()))


def in_a_bucket(scratch: Path, damages: int, clean: int) -> Tally:
    with s3_server(scratch / "seaweed") as server:
        server.make_bucket("checkpoints")
        os.environ.update(server.environment)
        urls = ["s3://checkpoints/run", "s3://checkpoints/another"]
        written = [sys.executable, "-m", "tests.checkpoint.shelves", *urls]
        subprocess.run(written, check=True, cwd=REPOSITORY)
        mine, other = (InBucket(server.client(), url) for url in urls)
        return run_campaign("S3", mine, shelves.taken_from(mine, other), damages, clean)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--disk", type=int, default=500, help="damages on a disk")
    parser.add_argument("--s3", type=int, default=250, help="damages on S3")
    parser.add_argument("--flips", type=int, default=200, help="bit flips to compare with DCP")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        ours, theirs = compare_with_dcp(scratch / "peers", args.flips)  # first: it forks
        history = shelves.make_history(scratch / "history")
        files = len(files_of(history.pristine, GOOD[0]))
        print(f"a history of {len(GOOD)} good checkpoints, each of {files} files, written by {shelves.WORLD} ranks")
        tallies = {"disk": run_campaign("disk", Disk(scratch / "disk"), history, args.disk, clean=150)}
        if args.s3:
            tallies["S3"] = in_a_bucket(scratch, args.s3, clean=50)
    show(tallies)
    missed = [f"{where}: {words}" for where, tally in tallies.items() for words in tally.missed]
    for words in missed[:20]:
        print(words)
    total = sum(sum(tally.tried.values()) for tally in tallies.values())
    print(f"\n{total} damages: {total - len(missed)} noticed and survived (bar: all)")
    print(f"\none bit flipped somewhere in a checkpoint, {args.flips} times{'Shoal':>20}{'torch DCP':>12}")
    for how in (REFUSED, RIGHT, WRONG):
        print(f"  {how:48}{ours[how]:>10}{theirs[how]:>12}")
    silent = args.flips - theirs[REFUSED]
    share = f"{silent / args.flips:.0%}"
    print(f"DCP loads {silent} of {args.flips} without a word ({share}), Shoal {args.flips - ours[REFUSED]}")
    return int(bool(missed) or ours[REFUSED] < args.flips)


if __name__ == "__main__":
    sys.exit(main())

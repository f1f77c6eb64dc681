"""`python -m tests.fuzz [READER…] --cases N --seed S [--minutes M] [--jobs J]`: what was found, and how fast."""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import pprint
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz import every, reach, sites
from tests.fuzz.reader import CASES, READERS, dump
from tests.fuzz.run import Found, Ran, Work, case_of, one, run

_MOST_KEPT = 20_000  # bytes of a case in the repository
_SLOW = 100  # of a smaller share: more than a millisecond a case
_BATCH = 100_000  # cases of one reader in a child: what piles up in a library ends with it


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument(
        "readers",
        nargs="*",
        metavar="READER",
        help="all, unless some are named; `list` names them, `sites` and `reach` see docs/guide/fuzzing.md",
    )
    parser.add_argument("--cases", type=int, help="in all, shared out by cost (default: 100,000; with --show 1)")
    parser.add_argument("--seed", type=int, default=0, help="of the first case (default: 0)")
    parser.add_argument("--minutes", type=float, help="at most so long")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--show", action="store_true", help="print each case and what becomes of it, in this process")
    parser.add_argument(
        "--save", action="store_true", help="keep the smallest case of each finding in tests/fuzz/cases"
    )
    asked = parser.parse_args()
    every.load()
    if asked.readers == ["list"]:
        for reader in READERS.values():
            print(f"{reader.name:24} {', '.join(reader.modules)}")
        return 0
    if asked.readers == ["reach"]:
        print(f"{len(reach.write())} places are reached")
        return _sites()
    if asked.readers == ["sites"]:
        return _sites()
    if unknown := set(asked.readers) - READERS.keys():
        parser.error(f"no reader is called {', '.join(sorted(unknown))}; `python -m tests.fuzz list` names all")
    names = asked.readers or list(READERS)
    if asked.show:
        return _show(names, asked.seed, asked.cases or 1)
    works = _shared_out(names, asked.cases or 100_000, asked.seed)
    until = None if asked.minutes is None else time.monotonic() + asked.minutes * 60
    began = time.monotonic()
    ran = _run(works, until, asked.jobs)
    findings = _report(ran, time.monotonic() - began)
    if asked.save:
        for found in findings:
            _save(found)
    return 1 if findings else 0


def _sites() -> int:
    """What `test_every_reader_has_a_generator` would say."""
    for place, parsers in sites.missing().items():
        print(f"no generator reaches {place} ({', '.join(sorted(parsers))})")
    for place in sites.stale():
        print(f"there is no such place any more: {place}")
    return 1 if sites.missing() or sites.stale() else 0


def _shared_out(names: list[str], cases: int, seed: int) -> list[Work]:
    whole = sum(READERS[name].share for name in names)
    works = []
    for name in names:
        count = max(1, cases * READERS[name].share // whole)
        works += [Work(name, seed + at, min(_BATCH, count - at)) for at in range(0, count, _BATCH)]
    return works


def _run(works: list[Work], until: float | None, jobs: int) -> Ran:
    if jobs == 1:
        results = (_alone(one, until) for one in turns(works, jobs))
        return _sum(results)
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        return _sum(pool.imap_unordered(_job, [(part, until) for part in turns(works, jobs)]))


def turns(works: list[Work], jobs: int) -> list[list[Work]]:
    """What each child does, in order. First batches first: with --minutes every reader gets its turn. Of these the
    slowest readers (the smallest share) first, and with several jobs each alone: else one that begins last runs on by
    itself when all others are done."""
    order = sorted(works, key=lambda work: (work.seed, READERS[work.reader].share))
    alone = [work for work in order if jobs > 1 and READERS[work.reader].share < _SLOW]
    rest = [work for work in order if work not in alone]
    return [[work] for work in alone] + [rest[at : at + 4] for at in range(0, len(rest), 4)]


def _alone(works: list[Work], until: float | None) -> Ran:
    return run(works, until)


def _job(asked: tuple[list[Work], float | None]) -> Ran:
    return run(*asked)


def _sum(results: object) -> Ran:
    whole = Ran({}, {}, {}, {})
    for ran in results:  # type: ignore[attr-defined]
        for name, count in ran.cases.items():
            whole.count(name, count, ran.taken[name], ran.cpu_s[name])
        for found in ran.found.values():
            if found.key not in whole.found:
                _print(found)
            whole.note(found)
    return whole


def _print(found: Found) -> None:
    print(f"\n{found.reader}: {found.place}")
    print(f"  python -m tests.fuzz {found.reader} --seed {found.seed} --show")
    print("  " + found.what.strip().replace("\n", "\n  "), flush=True)


def _report(ran: Ran, took_s: float) -> list[Found]:
    print(f"\n{'reader':24} {'cases':>10} {'taken':>6} {'CPU s':>8} {'cases/s':>8}")
    for name, count in sorted(ran.cases.items()):
        taken = ran.taken[name] / max(count, 1)
        print(f"{name:24} {count:10,} {taken:6.0%} {ran.cpu_s[name]:8.1f} {count / max(ran.cpu_s[name], 1e-9):8.0f}")
    total, cpu_s = sum(ran.cases.values()), sum(ran.cpu_s.values())
    findings = sorted(ran.found.values(), key=lambda f: f.key)
    print(f"\n{total:,} cases, {cpu_s:.0f} s of CPU, {took_s:.0f} s; {len(findings)} findings")
    for found in findings:
        said = (found.what.strip().splitlines() or [""])[-1][:200]
        print(f"  {found.reader} --seed {found.seed} ({found.count} times): {found.place}: {said}")
    return findings


def _show(names: list[str], seed: int, cases: int) -> int:
    code = 0
    for name in names:
        with tempfile.TemporaryDirectory(prefix="shoal-fuzz-") as folder:
            target = READERS[name].make(Path(folder))
            for at in range(seed, seed + cases):
                case = case_of(name, target, at)
                print(f"{name} {at}: {pprint.pformat(case)[:4000]}", flush=True)
                wrong = one(target, case)
                print(
                    {True: "taken", False: "refused"}[wrong] if isinstance(wrong, bool) else f"{wrong[0]}\n{wrong[1]}"
                )
                code |= not isinstance(wrong, bool)
    return code


def _save(found: Found) -> None:
    with tempfile.TemporaryDirectory(prefix="shoal-fuzz-") as folder:
        target = READERS[found.reader].make(Path(folder))
        ending, data = dump(case_of(found.reader, target, found.seed))
    if len(data) > _MOST_KEPT:
        print(f"{found.reader} --seed {found.seed} has {len(data)} bytes and is not kept: look for a smaller one")
        return
    into = CASES / found.reader
    into.mkdir(parents=True, exist_ok=True)
    (into / f"{hashlib.sha256(data).hexdigest()[:12]}.{ending}").write_bytes(data)


if __name__ == "__main__":
    sys.exit(main())

"""The rows of `benchmarks/swarm_convergence.py`: how peers keep together, who attacks, and what came of it."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from benchmarks.fleet.stacked_swarm import Course, End
from benchmarks.fleet.swarm_sim import Attack, Outcome, Sea, Size, Way, swarm

from shoal.codec import Codec
from shoal.spec.swarm import Swarm
from shoal.swarm.outer.exact import F32, norm
from shoal.swarm.outer.rule import Rule

GAP, TRAFFIC, HARM = 0.01, 150.0, 0.02
HOSTILE = 2
CLAIMED = ("2bit", "topk")
LONG = Size(dim=64, heads=4, ffn_dim=160, seq_len=128, batch=32, steps=16_000, lr=8e-3, held_out=None)
SMALL = replace(LONG, dim=32, heads=2, ffn_dim=96, steps=32_000)  # too small to learn its text by heart
SHORT = Size(dim=64, heads=4, ffn_dim=160, batch=16, steps=160)  # of the attacks: what harm they do shows early
TINY = Size(dim=32, heads=2, ffn_dim=64, batch=2, steps=32)


def shoal(codec: str) -> Rule:
    """What a run file without a word on it has."""
    return Rule.of(Swarm(codec=codec))


def ladder(lr: float) -> list[Course]:
    """Dense parts travel seldom, sparse ones often. Nobody of the peers is hostile, so that nothing is checked."""
    diloco = Rule(feedback=0.0, lr=0.7, momentum=0.9)
    return [
        *(Course(f"every step, bf16 ring, rate {rate:.1e}", rate) for rate in (lr / 2, lr, 2 * lr)),
        *(Course(codec, lr, shoal(codec), 80, 20) for codec in ("bf16", "int8", "int4", "2bit")),
        Course("topk", lr, shoal("topk"), 8, 2),
        # As published: the outer step waits for its ring (INTELLECT-1), or takes fragments in turn (torchft).
        Course("DiLoCo, int8 ring, no overlap", lr, replace(diloco, codec="int8"), 80, ring=True),
        Course(
            "torchft's DiLoCo: bf16 ring, 2 fragments", lr, replace(diloco, codec="bf16", fragments=2), 40, 20, True
        ),
    ]


def rates(lr: float) -> list[Course]:
    """What `auto` was chosen from: outer rates and momenta of sparse and of dense parts."""
    sparse = [(1.0, 0.0, 0.95), (1.5, 0.0, 0.95), (2.5, 0.0, 0.95), (3.5, 0.0, 0.95), (1.2, 0.5, 0.95), (2.0, 0.0, 1.0)]
    dense = [(1.0, 0.0, 1.0), (0.8, 0.6, 1.0), (0.7, 0.9, 1.0)]
    return [
        *(Course(f"every step, bf16 ring, rate {rate:.1e}", rate) for rate in (lr / 2, lr, 2 * lr)),
        *(_rated("topk", lr, 8, *rule) for rule in sparse),
        _rated("topk", lr, 6, *sparse[2]),
        *(_rated("2bit", lr, 80, *rule) for rule in dense),
    ]


def _rated(codec: str, lr: float, every: int, outer: float, momentum: float, feedback: float) -> Course:
    rule = replace(shoal(codec), lr=outer, momentum=momentum, feedback=feedback)
    return Course(f"{codec}, rate {outer}, momentum {momentum}, feedback {feedback}", lr, rule, every, every // 4)


def _garbage(part: F32, codec: Codec, random: np.random.Generator) -> bytes:
    noise = random.normal(size=len(part)).astype(np.float32)
    return codec.encode(noise * np.float32(norm(part) / norm(noise)), None, 0.0)


def _scaled(part: F32, codec: Codec, random: np.random.Generator, by: float = 100.0) -> bytes:
    return codec.encode(part * np.float32(by), None, 0.0)


def _scaled_10(part: F32, codec: Codec, random: np.random.Generator) -> bytes:
    return _scaled(part, codec, random, 10.0)


def _flipped(part: F32, codec: Codec, random: np.random.Generator) -> bytes:
    return _scaled(part, codec, random, -1.0)


ATTACKS: dict[str, Attack] = {"garbage": _garbage, "x100": _scaled, "x10": _scaled_10, "sign flipped": _flipped}


def attacks() -> list[Way]:
    rule = shoal("topk")
    ways = [Way("honest", rule)]
    for name, attack in ATTACKS.items():
        for robust in (True, False):
            said = f"{name}, checks {'on' if robust else 'off'}"
            ways.append(Way(said, replace(rule, robust=robust), attack=attack, hostile=HOSTILE))
    return ways


def run(ways: Sequence[Way], size: Size, workspace: Path, processes: int) -> list[Outcome]:
    """Side by side; each takes one core."""
    start = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(processes, mp_context=start) as pool:
        told = [pool.submit(_one, way, size, workspace) for way in ways]
        for done, _ in enumerate(as_completed(told), 1):
            print(f"{done} of {len(told)} ways are trained", file=sys.stderr, flush=True)
        return [one.result() for one in told]


def _one(way: Way, size: Size, workspace: Path) -> Outcome:
    torch.set_num_threads(1)
    return swarm(Sea(workspace, size), way)


Check = tuple[str, bool]


def print_ladder(courses: Sequence[Course], found: Sequence[End], size: Size) -> list[Check]:
    """Against the best rate of data parallelism."""
    every = [end for course, end in zip(courses, found, strict=True) if course.rule is None]
    best, seen = min(end.loss for end in every), min(end.trained for end in every)
    print(f"{size.peers} peers, {size.steps:,} steps of {size.peers * size.batch * size.seq_len:,} tokens")
    print(
        f"{'codec':<46} {'H':>3} {'bytes/step':>11} {'less':>7} {'held out':>9} {'gap':>8} {'its text':>9} {'gap':>8}"
    )
    checks = []
    for course, end in zip(courses, found, strict=True):
        ratio, gap = every[0].bytes_per_step / end.bytes_per_step, end.loss / best - 1
        print(
            f"{course.name:<46} {course.every:>3} {end.bytes_per_step:>11,.0f} {ratio:>6.1f}x {end.loss:>9.4f} "
            f"{gap:>+8.2%} {end.trained:>9.4f} {end.trained / seen - 1:>+8.2%}"
        )
        if course.name in CLAIMED:
            checks += [
                (f"{course.name}: loss {gap:+.2%} of every-step data parallelism (bar {GAP:.0%})", gap <= GAP),
                (f"{course.name}: {ratio:.0f} times less traffic (bar {TRAFFIC:.0f})", ratio >= TRAFFIC),
            ]
    return checks


def print_attacks(ways: list[Way], found: list[Outcome]) -> list[Check]:
    honest, checks = found[0], []
    print(f"\n{HOSTILE} hostile peers of 8, topk")
    print(f"{'what they send':<42} {'loss':>8} {'to honest':>10}  rounds in which they were left out; others")
    for way, one in zip(ways, found, strict=True):
        gap = one.loss / honest.loss - 1
        theirs = sum(n for peer, n in one.out.items() if int(peer[4:]) < way.hostile)
        others = sum(one.out.values()) - theirs
        print(f"{way.name:<42} {one.loss:>8.4f} {gap:>+10.2%}  {theirs / max(1, way.hostile):.0f}; {others}")
        if way.hostile and way.rule.robust:
            checks.append((f"{way.name}: {gap:+.2%} of the honest run (bar {HARM:.0%})", gap <= HARM))
    return checks

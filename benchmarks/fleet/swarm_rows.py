"""The rows of `benchmarks/swarm_convergence.py`: how peers keep together, who attacks, and what came of it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from benchmarks.fleet.swarm_sim import Attack, Outcome, Sea, Size, Way, every_step, swarm

from shoal.fleet.codec import Codec
from shoal.fleet.outer.exact import F32, norm
from shoal.fleet.outer.rule import Rule
from shoal.spec.swarm import Swarm

GAP, TRAFFIC, HARM = 0.01, 150.0, 0.02
HOSTILE = 2
FULL = Size(dim=64, heads=4, ffn_dim=160, batch=16, steps=640)
SHORT = replace(FULL, steps=160)  # of the attacks: what harm they do shows early
TINY = Size(dim=32, heads=2, ffn_dim=64, batch=2, steps=32)


DENSE = (1.0, 0.0)  # outer rate and momentum: with momentum dense parts overshoot at this size


def shoal(codec: str) -> Rule:
    """What a run file without a word on it has; dense parts lose little, and want a smaller rate."""
    rule = replace(Rule.of(Swarm()), codec=codec)
    return rule if codec == "topk" else replace(rule, lr=DENSE[0], momentum=DENSE[1], feedback=1.0)


def ladder() -> list[Way]:
    diloco = Rule(feedback=0.0, lr=0.7, momentum=0.9, robust=False)
    return [
        *(Way(codec, shoal(codec)) for codec in ("bf16", "int8", "int4", "2bit", "topk")),
        # As published: the outer step waits for its ring (INTELLECT-1), or takes fragments in turn (torchft).
        Way("DiLoCo, int8 ring, no overlap", replace(diloco, codec="int8"), delay=0, ring=True),
        Way("torchft's DiLoCo: bf16 ring, 2 fragments", replace(diloco, codec="bf16", fragments=2), every=4, ring=True),
    ]


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


def run(jobs: Sequence[tuple[Way | None, Size]], workspace: Path, processes: int) -> list[Outcome]:
    """Side by side; each takes one core. None: every-step data parallelism."""
    start = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(processes, mp_context=start) as pool:
        told = [pool.submit(_one, way, size, workspace) for way, size in jobs]
        return [one.result() for one in told]


def _one(way: Way | None, size: Size, workspace: Path) -> Outcome:
    torch.set_num_threads(1)
    sea = Sea(workspace, size)
    return every_step(sea) if way is None else swarm(sea, way)


Check = tuple[str, bool]


def print_ladder(base: Outcome, ways: list[Way], found: list[Outcome], size: Size) -> list[Check]:
    print(f"{size.peers} peers, {size.steps} steps of {size.peers * size.batch * size.seq_len:,} tokens")
    print(f"{'codec':<42} {'H':>3} {'bytes/step':>12} {'less traffic':>12} {'loss':>8} {'gap':>8}")
    print(f"{'every step, bf16 ring':<42} {1:>3} {base.bytes_per_step:>12,.0f} {1:>11}x {base.loss:>8.4f}")
    checks = []
    for way, one in zip(ways, found, strict=True):
        ratio, gap = base.bytes_per_step / one.bytes_per_step, one.loss / base.loss - 1
        print(
            f"{way.name:<42} {way.every:>3} {one.bytes_per_step:>12,.0f} {ratio:>11.1f}x {one.loss:>8.4f} {gap:>+8.2%}"
        )
        if way.name == "topk":
            checks += [
                (f"topk: loss {gap:+.2%} of every-step data parallelism (bar {GAP:.0%})", gap <= GAP),
                (f"topk: {ratio:.0f} times less traffic (bar {TRAFFIC:.0f})", ratio >= TRAFFIC),
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

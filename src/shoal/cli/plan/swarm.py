"""`shoal plan swarm RUN.yaml`: how busy peers are that train it over slow links, by rounds and compression."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

from shoal.cli.plan.shared import counts, layouts, names, one, target, wanted
from shoal.errors import UsageError
from shoal.near import closest
from shoal.plan.constants import spread
from shoal.plan.explain import words
from shoal.plan.swarm import CODECS, Codec, Exchange, Link, Swarm, Utilisation, advise, utilisation
from shoal.plan.verdict import Range
from shoal.readable import count, duration, size
from shoal.spec.run import Run

ROUNDS = (10, 30, 100, 500)
EXCHANGES: tuple[Exchange, ...] = get_args(Exchange)


@dataclass(frozen=True)
class Cell:
    swarm: Swarm
    found: Utilisation
    busy: Range  # with what is not known of the step


def run(args: argparse.Namespace) -> int:
    spec, shape = wanted(args)
    if spec.fleet.islands > 1:
        raise UsageError("a swarm has --peers and no islands; set fleet.islands=1.")
    step, what = _step(args, spec)
    peers = 8 if args.peers is None else args.peers
    if peers < 1:
        raise UsageError(f"--peers {args.peers}: at least one peer has to train.")
    codecs = [_codec(name) for name in names(args.compression)] or list(CODECS.values())
    rounds = _rounds(args.inner_steps)
    link, target_share = _link(args), _share(args.target or "97%", "--target")
    base = Swarm(peers, step.expected, rounds[0], shape.params, codecs[0], link, overlap=bool(args.overlap))
    cells = [[_cell(replace(base, codec=c, sync_every=h), args.exchange, step) for h in rounds] for c in codecs]
    # Advice starts from what was asked for; where all is open, from the smallest that is known to train well.
    asked = cells[0][0] if args.compression else next(row[0] for row in cells if row[0].swarm.codec.name == "top-k")
    advice = advise(asked.swarm, target_share)
    if args.json:
        print(json.dumps(_as_json(spec, shape.params, step, cells, advice), indent=2))
    else:
        title = (
            f"{spec.name}: {count(shape.params)} parameters, {peers} peer{'s' * (peers > 1)}, "
            f"{link.up_bits_per_s / 1e6:g} Mbit/s up and "
            f"{link.down_bits_per_s / 1e6:g} down, {link.rtt_s * 1000:g} ms, {link.loss:.3g} of packets lost"
            f"{', the exchange beside the next steps' if base.overlap else ''}"
        )
        told = f"An inner step takes a peer {duration(step.expected)} ({what})."
        print("\n".join([title, told, "", *_lines(rounds, cells), "", f"{advice[0].upper()}{advice[1:]}."]))
    return 0


def _step(args: argparse.Namespace, spec: Run) -> tuple[Range, str]:
    """Of one peer, which computes train.batch windows of its own in each."""
    if args.step_s is not None:
        if not 0 < args.step_s < math.inf:
            raise UsageError(f"--step-s {args.step_s:g}: a step takes more than 0 seconds.")
        return Range(args.step_s, args.step_s, args.step_s), "as given"
    name, fabric = one(names(args.on), "--on"), one(names(args.fabric), "--fabric")
    devices = one(counts(args.devices), "--devices")
    where = target(args, spec, name, fabric, devices)
    if devices is None and spec.plan.devices is not None:  # that is the whole run's, and a peer is a node of it
        where = replace(where, devices=where.device.per_node)
    best = layouts(where.asked(*wanted(args)), 1)[0]
    low, high = spread()
    found = Range(best.seconds / high, best.seconds, best.seconds / low)
    return found, f"{spec.train.batch:,} windows on {where.words}: {words(best.layout, best.recompute)}"


def _cell(swarm: Swarm, exchange: str | None, step: Range) -> Cell:
    """By the exchange that is quickest for it, unless one is named; the link and the step are wrong independently."""
    ways: list[Exchange] = [way for way in EXCHANGES if way != "store" and (swarm.codec.adds_up or way == "all_gather")]
    if exchange is not None:
        ways = [_exchange(exchange)]
    best = max((replace(swarm, exchange=way) for way in ways), key=lambda s: utilisation(s).expected)
    found = utilisation(best)
    quick, slow = (utilisation(replace(best, step_s=s)).expected for s in (step.low, step.high))
    low = found.expected - math.hypot(found.expected - found.low, found.expected - quick)
    high = found.expected + math.hypot(found.high - found.expected, slow - found.expected)
    return Cell(best, found, Range(max(0.0, low), found.expected, min(1.0, high)))


def _lines(rounds: Sequence[int], cells: Sequence[Sequence[Cell]]) -> Iterator[str]:
    table = [("compression", "payload", "exchange", *(f"every {h:,} steps" for h in rounds))]
    for row in cells:
        first = row[0]
        way = f"{duration(first.found.exchange_s)} ({first.swarm.exchange})"
        busy = [
            f"{c.busy.expected:.1%} ({c.busy.low:.0%} to {c.busy.high:.0%})"
            + "*" * (c.swarm.sync_every > c.swarm.codec.shown)
            for c in row
        ]
        table.append((first.swarm.codec.name, size(first.swarm.payload_bytes), way, *busy))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        yield "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip()
    yield "Share of the time in which a peer computes; 90% of what links did when measured, and four of five steps,"
    yield "are in the interval. *: longer rounds than are known to train well with it (guide/goodput.md)."


def _link(args: argparse.Namespace) -> Link:
    text = args.mbit or "100"
    up, _, down = text.partition("/")
    try:
        rates = [float(up), float(down or up)]
    except ValueError:
        rates = [0.0]
    if not all(0 < rate < math.inf for rate in rates):
        raise UsageError(f"--mbit {text}: give Mbit/s, as in 100, or UP/DOWN as in 100/500.")
    latency = 100.0 if args.latency_ms is None else args.latency_ms
    if not 0 <= latency < math.inf:
        raise UsageError(f"--latency-ms {latency:g}: give milliseconds there and back, 0 or more.")
    loss = _share(args.loss or "0.1%", "--loss")
    return Link(rates[0] * 1e6, rates[1] * 1e6, latency / 1000, loss, achieved=bool(args.achieved))


def _share(text: str, option: str) -> float:
    number, percent = (text[:-1], 100.0) if text.endswith("%") else (text, 1.0)
    try:
        share = float(number) / percent
    except ValueError:
        share = -1.0
    least = 0.0 if option == "--loss" else 1e-9
    if not least <= share < 1:
        raise UsageError(f"{option} {text}: give a share, as in {'0.1% or 0.001' if option == '--loss' else '97%'}.")
    return share


def _rounds(text: str | None) -> list[int]:
    try:
        rounds = [int(word) for word in names(text)]
    except ValueError:
        rounds = [0]
    if any(h < 1 for h in rounds):
        raise UsageError(f"--inner-steps {text}: give whole numbers of steps, 1 or more.")
    return rounds or list(ROUNDS)


def _codec(name: str) -> Codec:
    spelled = {key.replace("-", "").replace(" ", ""): codec for key, codec in CODECS.items()}
    wanted_name = name.lower().replace("-", "").replace("_", "").replace(" ", "")
    if wanted_name in spelled:
        return spelled[wanted_name]
    near = closest(wanted_name, spelled)
    begin = f"did you mean {spelled[near].name}? There" if near else "there"
    raise UsageError(f"--compression {name}: {begin} are {', '.join(CODECS)}.")


def _exchange(name: str) -> Exchange:
    for way in EXCHANGES:
        if way == name.replace("-", "_"):
            return way
    raise UsageError(f"--exchange {name}: there are {', '.join(EXCHANGES)}.")


def _as_json(spec: Run, params: float, step: Range, cells: Sequence[Sequence[Cell]], advice: str) -> dict[str, Any]:
    return {
        "run": spec.name,
        "parameters": params,
        "step_s": asdict(step),
        "rows": [
            {
                "compression": cell.swarm.codec.name,
                "inner_steps": cell.swarm.sync_every,
                "exchange": cell.swarm.exchange,
                "payload_bytes": cell.swarm.payload_bytes,
                "exchange_s": cell.found.exchange_s,
                "busy": asdict(cell.busy),
                "sent_bytes_per_step": cell.found.sent_bytes_per_step,
                "received_bytes_per_step": cell.found.received_bytes_per_step,
                "shown_to_train": cell.swarm.sync_every <= cell.swarm.codec.shown,
            }
            for row in cells
            for cell in row
        ],
        "advice": advice,
    }

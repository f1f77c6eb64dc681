"""`shoal plan goodput RUN.yaml`: what failures leave of the time, on so many devices, by the way a run comes back."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shoal.cli.plan.shared import counts, failing, is_here, names, one, target, wanted
from shoal.errors import UsageError
from shoal.plan.failures import FailureRate
from shoal.plan.goodput import Goodput, goodput
from shoal.plan.restarts import STYLES, Style, style
from shoal.plan.verdict import BLOCKING_S, SAVED_BYTES, save_s
from shoal.readable import count, duration, size
from shoal.spec.run import Run
from shoal.spec.shape import Shape

SIZES = (1024, 16_384, 131_072)
# Of the peak, for the length of a step: it matters to islands only, and little.
USUAL_MFU = 0.4
# They save to storage that all share, and wait until it is written; the others save near, and go on after a moment.
SAVE_FAR = ("manual", "remote")


@dataclass(frozen=True)
class Cell:
    style: Style
    devices: int
    goodput: Goodput | None  # None: too few devices for islands


def run(args: argparse.Namespace) -> int:
    if args.price or args.fabric:
        raise UsageError("--price and --fabric change no goodput; leave them out, or use `shoal plan compare`.")
    spec, shape = wanted(args)
    rates, islands = failing(args, spec), spec.fleet.islands
    styles = [style(name, islands) for name in names(args.style) or STYLES]
    where = target(args, spec, one(names(args.on), "--on"), None, islands)
    if is_here(where.device) and args.on is None and spec.plan.on is None:
        raise UsageError("name the devices, as in `shoal plan goodput RUN.yaml --on h100`.")
    sizes = counts(args.devices) or ([spec.plan.devices] if spec.plan.devices else list(SIZES))
    per_node = where.device.per_node
    peak = where.asked(spec, shape).peak
    cells = [_cell(how, n, min(n, per_node), rates, spec, shape, peak) for how in styles for n in sizes]
    if args.json:
        print(json.dumps(_as_json(rates, cells), indent=2))
    else:
        title = (
            f"{spec.name}: {count(shape.params)} parameters, checkpoints of {size(SAVED_BYTES * shape.params)}, on "
            f"{where.device.name}, {per_node} a node; failures as '{rates.name}' ({rates.date}: {rates.derived})"
        )
        print("\n".join([title, "", *_lines(rates, styles, sizes, cells)]))
    return 0


def _cell(how: Style, devices: int, per_node: int, rates: FailureRate, spec: Run, shape: Shape, peak: float) -> Cell:
    if devices < how.islands * per_node:
        return Cell(how, devices, None)
    far = how.name in SAVE_FAR
    writes = save_s(shape.params, math.ceil(devices / how.islands / per_node), far)
    blocks = writes if far else min(BLOCKING_S, writes)
    flops = shape.flops_per_token(spec.data.seq_len, True) * spec.train.batch * spec.data.seq_len
    step_s = flops / (USUAL_MFU * peak * devices)
    return Cell(how, devices, goodput(devices, per_node, rates, how, writes, blocks, step_s=step_s))


def _lines(rates: FailureRate, styles: Sequence[Style], sizes: Sequence[int], cells: Sequence[Cell]) -> Iterator[str]:
    shown = {(cell.style.name, cell.devices): cell for cell in cells}
    yield f"{'goodput, 90% interval':<24}" + "".join(f"{n:>24,}" for n in sizes)
    for how in styles:
        row = [shown[how.name, n].goodput for n in sizes]
        name = f"{how.name} ({how.islands})" if how.islands > 1 else how.name
        yield f"{name:<24}" + "".join(f"{'-' if found is None else str(found):>24}" for found in row)
    yield f"{'a failure every':<24}" + "".join(f"{duration(rates.mttf_s(n)):>24}" for n in sizes)
    yield ""
    for how in styles:
        last = [shown[how.name, n] for n in sizes if shown[how.name, n].goodput is not None]
        if not last:
            yield f"{how.name}: {how.islands} islands need a node each; take more devices or fewer islands."
            continue
        found = last[-1].goodput
        assert found is not None
        every = f"a save every {duration(found.interval_s)}"
        yield f"{how.name}: {how.what}. On {last[-1].devices:,} devices {every}; {found.advice}."


def _as_json(rates: FailureRate, cells: Sequence[Cell]) -> dict[str, Any]:
    return {
        "rates": {"name": rates.name, "source": rates.source, "date": rates.date, "derived": rates.derived},
        "rows": [
            {
                "style": cell.style.name,
                "islands": cell.style.islands,
                "devices": cell.devices,
                "goodput": None if cell.goodput is None else asdict(cell.goodput),
            }
            for cell in cells
        ],
    }

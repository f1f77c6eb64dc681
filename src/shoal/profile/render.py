"""The analysis as a person reads it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shoal.observe.throughput import CONVENTION
from shoal.profile.advice import advice, ms
from shoal.profile.analyse import Analysis, slowest
from shoal.profile.kernels import Kernel, short_name
from shoal.profile.kinds import ABOUT, COMMUNICATION, UNACCOUNTED
from shoal.readable import count, percent, size

WORST = 10
GOAL = 0.97  # of a step: less is told as a defect of the profile
NAME_WIDTH = 60


def report(ranks: Sequence[Analysis]) -> str:
    """The rank that the others wait for, beside the first; one of them if they are the same."""
    first, slow = ranks[0], slowest(ranks)
    shown = [first] if slow is first else [slow, first]
    lines = [_head(shown[0], len(ranks)), *_spread(ranks), "", *_kinds(shown), "", *_accounted(shown[0]), ""]
    lines += [*_worst(shown[0]), ""]
    best = advice(shown[0])
    lines.append(f"next: {best.sentence}" if best else "next: nothing here would save a hundredth of a step.")
    return "\n".join(lines)


def _head(a: Analysis, ranks: int) -> str:
    about = a.about
    where = f"rank {a.rank} of {about.get('world', ranks)}, " if ranks > 1 or about.get("world", 1) > 1 else ""
    software = f", torch {about['torch']}" if about.get("torch") else ""
    precision = f" in {about['precision']}" if about.get("precision") else ""
    text = f"{about.get('run', a.file.name)}: {where}{a.device}{precision}{software}\n"
    text += f"{a.steps} step{'s' * (a.steps > 1)} traced, {ms(a.step_s)} each"
    if a.untraced_step_s:
        slower = a.step_s / a.untraced_step_s - 1
        text += f"; untraced {ms(a.untraced_step_s)} (tracing costs {percent(max(0.0, slower), 0)})"
    if a.tokens_per_s:
        text += f", {count(a.tokens_per_s)} tokens/s"
    text += "".join(f", {figure}" for figure in _used(a))
    if about.get("memory_bytes"):
        text += f", {size(float(about['memory_bytes']))} at the peak"
    return text


def _used(a: Analysis) -> Iterator[str]:
    """What the step needed of the device, counted as `shoal report` does, in the time of an untraced step."""
    about, step_s = a.about, a.untraced_step_s or a.step_s
    needed, done = ((about.get(f"{kind}_per_step") or 0.0) for kind in ("flops", "hardware_flops"))
    world, peak = int(about.get("world", 1)), about.get("peak_flops")
    if needed:
        rate = float(needed) / step_s / world
        yield f"{rate / 1e12:.3g} TFLOP/s a process"
        if peak:
            yield f"MFU {percent(rate / float(peak))} ({CONVENTION})"
            yield f"HFU {percent(float(done) / step_s / world / float(peak))}"
    if about.get("moved_bytes") and about.get("peak_bandwidth"):
        moved = float(about["moved_bytes"]) / step_s
        yield f"memory {moved / 1e12:.2f} TB/s ({percent(moved / float(about['peak_bandwidth']), 0)} of its bandwidth)"


def _spread(ranks: Sequence[Analysis]) -> Iterator[str]:
    if len(ranks) < 2:
        return
    slow, waits = slowest(ranks), max(ranks, key=lambda one: one.waited_s)
    yield (
        f"{len(ranks)} processes: rank {slow.rank} is the one that others wait for (it waits {ms(slow.waited_s)} a "
        f"step, rank {waits.rank} {ms(waits.waited_s)})"
    )


def _kinds(shown: Sequence[Analysis]) -> Iterator[str]:
    heads = [f"rank {a.rank}: ms" if len(shown) > 1 else "ms a step" for a in shown]
    yield f"{'kind':<14}" + "".join(f"{head:>12} {'share':>6}" for head in heads) + "   where"
    for part in shown[0].parts:
        each = [a.part(part.kind) for a in shown]
        if not any(one.seconds for one in each) and part.kind != UNACCOUNTED:
            continue
        columns = "".join(f"{one.seconds * 1e3:>12.2f} {percent(one.share):>6}" for one in each)
        phases = ", ".join(f"{name} {percent(s / part.seconds, 0)}" for name, s in list(part.phases.items())[:3] if s)
        yield f"{part.kind:<14}{columns}   {phases or ABOUT[part.kind]}"
    for a in shown:
        all_of_it = a.hidden_s + a.part(COMMUNICATION).seconds
        if all_of_it:
            of = f" (rank {a.rank})" if len(shown) > 1 else ""
            share = percent(a.hidden_s / all_of_it, 0)
            yield f"hidden{of}: {ms(a.hidden_s)} of communication a step while something computes, {share} of it"
    if shown[0].idle:
        yield "idle: " + ", ".join(f"{ms(s)} {why}" for why, s in list(shown[0].idle.items())[:3])


def _accounted(a: Analysis) -> Iterator[str]:
    rest = ", ".join(f"{short_name(name)} {ms(s)}" for name, s in list(a.unknown.items())[:3])
    line = f"accounted for: {percent(a.accounted)} of a step"
    yield f"{line}; unaccounted: {rest}" if rest else line
    if a.accounted < GOAL:
        yield f"(below {percent(GOAL, 0)}: what is named above has no kind; please report it)"


def _worst(a: Analysis) -> Iterator[str]:
    roof = a.roof
    rates = ", ".join(
        f"{rate / 1e12:.4g} TFLOP/s {p}" for p, rate in roof.flops.items() if p in ("bf16", "fp8", "fp32")
    )
    against = f"{rates}, {roof.bandwidth / 1e9:.4g} GB/s; {roof.whence}" if roof.bandwidth else roof.whence
    yield f"the kernels that lose most against the roofline ({against})"
    yield f"{'ms a step':>9} {'calls':>6} {'of roof':>8}  {'achieved':<15} {'kind':<12} kernel"
    for kernel in a.kernels[:WORST]:
        yield (
            f"{kernel.seconds * 1e3:>9.3f} {kernel.calls:>6.3g} {_share(kernel):>8}  "
            f"{_achieved(kernel):<15} {kernel.kind:<12} {_label(kernel)}"
        )


def _share(kernel: Kernel) -> str:
    return "-" if kernel.share is None else percent(kernel.share, 0)


def _achieved(kernel: Kernel) -> str:
    if kernel.achieved is None:
        return "-"
    unit, scale = ("TFLOP/s", 1e12) if kernel.bound == "compute" else ("GB/s", 1e9)
    return f"{kernel.achieved / scale:.3g} {unit}"


def _label(kernel: Kernel) -> str:
    name = short_name(kernel.name)
    name = name if len(name) <= NAME_WIDTH else name[: NAME_WIDTH - 1] + "…"
    by = f" by {kernel.operator}" if kernel.operator and kernel.operator != kernel.name else ""
    return f"{name}{by} {kernel.shapes}".rstrip()

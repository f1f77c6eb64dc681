"""What several processes must do together: collectives on every rank, each its own part of the data, in a new order."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from shoal.adopt.code import Unit, argument, constant, is_open
from shoal.adopt.finding import Finding
from shoal.adopt.graph import Graph
from shoal.adopt.guards import OTHERS, ZERO
from shoal.adopt.training import Training

_COLLECTIVE = re.compile(
    r"torch\.distributed(\.distributed_c10d)?\.(all_reduce|all_gather\w*|all_to_all\w*|broadcast\w*|barrier"
    r"|monitored_barrier|reduce|reduce_scatter\w*|gather\w*|scatter\w*)$"
    r"|torch\.distributed\.checkpoint(\.\w+)*\.(save|load|async_save|get_model_state_dict|get_optimizer_state_dict|get_state_dict)$"
)
_OF_HELPER = (
    "wait_for_everyone",
    "gather",
    "gather_for_metrics",
    "reduce",
    "save_state",
    "barrier",
    "all_gather",
    "all_reduce",
)
_SPLITS = re.compile(
    r"(split_dataset_by_node|\.shard|split_between_processes|DistributedBatchSampler|\.prepare|ShardingFilter\w*|prepare_data_loader)$"
)


def collective(t: Training, call: ast.Call, unit: Unit, full: str) -> str | None:
    """Its name, if every rank has to make this call."""
    if _COLLECTIVE.match(full):
        return None if argument(call, "group") is not None else full.rpartition(".")[2]
    if not isinstance(call.func, ast.Attribute):
        return None
    last, kinds = call.func.attr, t.kinds.of(call.func.value)
    if last in _OF_HELPER and kinds & {"accelerator", "fabric"}:
        return last
    if last == "save_checkpoint" and "engine" in kinds:
        return last
    whole = last == "state_dict" and "fsdp" in kinds and t.code.reads(call.func.value) != "module"
    return "state_dict (of FSDP)" if whole else None


def one_rank_collective(t: Training) -> Iterator[Finding]:
    made = {call: (unit, name) for call, unit, full in t.calls if (name := collective(t, call, unit, full))}
    for unit in t.units:
        for call in unit.calls:
            names = [made[call][1]] if call in made else sorted(_within(t, call, made))
            if not names:
                continue
            for guard in t.guards.around(call):
                which = t.guards.ranks(guard, unit)
                if which is None or _paired(t, unit, guard.test, which, call, made, names):
                    continue
                who = "rank 0 comes" if which == ZERO else "the others come"
                inside = "" if call in made else f" (in {t.code.reads(call.func)})"
                yield Finding(
                    "one-rank-collective",
                    unit.module.shown,
                    t.line(call),
                    f"{names[0]}{inside} waits for every rank, and only {who} here.",
                )
                break


def _within(t: Training, call: ast.Call, made: dict[ast.Call, tuple[Unit, str]]) -> set[str]:
    """The collectives of functions of the project that it calls, which are under no guard of ranks there."""
    if not made:
        return set()
    inside = (node for callee in t.graph.callees.get(call, ()) for node in t.graph.inside(callee.nodes))
    return {made[n][1] for n in inside if isinstance(n, ast.Call) and n in made and not _guarded(t, n)}


def _guarded(t: Training, node: ast.AST) -> bool:
    """By a rank; or by whether there is a group at all: then a process alone may call it."""
    unit = t.code.unit_of[node]
    return any(t.guards.ranks(guard, unit) for guard in t.guards.around(node))


def _paired(
    t: Training, unit: Unit, test: ast.expr, which: str, call: ast.Call, made: dict[ast.Call, tuple[Unit, str]],
    names: list[str],
) -> bool:  # fmt: skip
    """The other ranks make the same call in their branch, or under a condition of their own."""
    for other in unit.calls:
        if other is call:
            continue
        same = [made[other][1]] if other in made else sorted(_within(t, other, made))
        if not set(same) & set(names):
            continue
        sides = {t.guards.ranks(guard, unit) for guard in t.guards.around(other)}
        if (OTHERS if which == ZERO else ZERO) in sides:
            return True
    return False


def sampler_epoch(t: Training) -> Iterator[Finding]:
    if "accelerator" in t.helpers or "fabric" in t.helpers or any(True for _ in t.methods("set_epoch")):
        return
    shuffles = [(c, u) for c, u in t.made("shares") if constant(argument(c, "shuffle", 3)) is not False]
    epochs = [loop for loop in t.step_loops if len(_epochs(t, loop)) > 0]
    for call, unit in shuffles[:1] if epochs else []:
        if not is_open(call):
            yield Finding(
                "sampler-epoch",
                unit.module.shown,
                t.line(call),
                "set_epoch of the DistributedSampler is never called: every epoch has the same order.",
            )


def _epochs(t: Training, loop: ast.AST) -> list[ast.AST]:
    """Loops around the one that reads the batches."""
    if not isinstance(loop, ast.For | ast.AsyncFor):
        return []
    over = t.kinds.of(loop.iter)
    return list(t.graph.loops(loop)) if "loader" in over or not over else []


def ddp_sampler(t: Training) -> Iterator[Finding]:
    if not (t.made("ddp") or t.made("fsdp") or t.kinds.sharded) or t.helpers:
        return
    if t.made("shares") or any(_SPLITS.search(full) for _, _, full in t.calls):
        return
    for loop in t.step_loops:
        if not isinstance(loop, ast.For | ast.AsyncFor):
            continue
        for call, unit in t.made("loader"):
            if not reads(t, loop, call) or is_open(call):
                continue
            if argument(call, "sampler", 3) or argument(call, "batch_sampler", 4) or argument(call, "generator"):
                continue
            data = argument(call, "dataset", 0)
            if data is None or "stream" in t.kinds.of(data) or _knows_rank(t, data, t.graph):
                continue
            yield Finding(
                "ddp-sampler",
                unit.module.shown,
                t.line(call),
                "every rank reads all of the data: the loader has no sampler that shares it out.",
            )


def reads(t: Training, loop: ast.For | ast.AsyncFor, made: ast.Call) -> bool:
    """Whether the loop reads from this loader: it is followed to it, or is the only one."""
    return t.kinds.place(made) in t.kinds.of(loop.iter) or len(t.made("loader")) == 1


def _knows_rank(t: Training, data: ast.expr, graph: Graph) -> bool:
    """Whether a rank is anywhere in how the data set is made."""
    wanted: list[ast.AST] = [data]
    seen = set[ast.AST]()
    while wanted and len(seen) < 200:
        node = wanted.pop()
        if node in seen:
            continue
        seen.add(node)
        for one in ast.walk(node):
            if isinstance(one, ast.Name | ast.Attribute | ast.Constant):
                said = str(one.value) if isinstance(one, ast.Constant) else t.code.reads(one)
                if "rank" in said.lower() or "world" in said.lower():
                    return True
            if isinstance(one, ast.Name) and one in t.code.unit_of:
                unit = t.code.unit_of[one]
                if found := t.code.binding(one.id, unit):
                    wanted += [b.value for b in found[1]]
            for callee in graph.callees.get(one, ()):
                wanted += callee.returned
                if callee.name == "__init__":
                    wanted += [n for n in callee.nodes if isinstance(n, ast.Assign)]
    return False

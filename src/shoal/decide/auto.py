"""Closes every `auto` of a run before anything is started, and says why. No torch: the supervisor calls this."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.decide.decision import Choices, Decision
from shoal.decide.device import choose_device, kernels_for, refuse_what_these_cannot
from shoal.decide.length import measured
from shoal.decide.mesh import close_mesh, closed_mesh
from shoal.decide.torch_installed import refuse_schedule
from shoal.errors import SetupError, SpecError
from shoal.plan.island_costs import shards
from shoal.spec import eight_bits
from shoal.spec.balancing import balancing, loses_bias, with_balancing
from shoal.spec.mesh import ONLY_FSDP_SCATTERS, Sizes
from shoal.spec.precision import evaluated_in, problem
from shoal.spec.run import Run
from shoal.spec.shape import Shape, shape_of
from shoal.spec.start_values import rule_of, with_rule

if TYPE_CHECKING:
    from shoal.data.shards import TokenShards
    from shoal.plan.documents import Documents

# Float32 weights, gradients and AdamW's two moments.
STATE_BYTES = 16
# More processes than this on one CPU lose to threads inside the matmul.
MOST_CPU_PROCESSES = 8


@dataclass(frozen=True)
class Decided:
    run: Run
    world: int
    decisions: tuple[Decision, ...]


def decide(run: Run, workspace: Path, world: int | None = None, here: int | None = None) -> Decided:
    """The run with nothing left open. `world` is set when somebody else (torchrun) has started the processes; `here`
    of them are on this machine, where they are not all (torchrun says it too)."""
    length = measured(run, workspace)
    run, choices = length.run, Choices(list(length.decisions))
    choose = choices.choose
    where = choose_device(run, choices, started=world is not None)
    device, gpus = where.device, where.gpus
    opened = _look_at_data(run, workspace)
    tokenizer_vocab = opened[0].vocab_size if opened else None  # own.data brings none
    shape = shape_of(run.model, tokenizer_vocab)
    if tokenizer_vocab is not None and shape.vocab_size < tokenizer_vocab:
        raise SpecError(
            f"model.vocab_size is {shape.vocab_size:,}, but the data's tokenizer has {tokenizer_vocab:,} tokens: "
            "use auto, or prepare the data with the model's tokenizer."
        )
    unknown = run.foreign is not None  # the shape is none, but for its vocabulary
    if run.model.weights is None and not unknown:
        choose("model.init", run.model.init, *rule_of(run.model, run.train.optimizer.name))
    if run.model.experts is not None:
        rate, loss, why = balancing(run.model)
        choose("model.experts.balance_rate", run.model.experts.balance_rate, rate, why)
        without = "biases balance its experts" if rate else "balance_rate 0 asks for no balance"
        choose("model.experts.balance_loss", run.model.experts.balance_loss, loss, why if loss else without)
        if rate and loses_bias(run.model.family):  # better known now than after weeks
            stated = f"as stated; {run.model.family} has no place for a bias, so an export will be refused"
            choices.made.append(Decision("model.experts.balance_rate", rate, stated))
    vocab = choose("model.vocab_size", run.model.vocab_size, shape.vocab_size, "the tokenizer's, rounded up to 64")

    cores, islands = len(os.sched_getaffinity(0)), run.fleet.islands
    room = max(1, (gpus if device == "cuda" else min(cores, MOST_CPU_PROCESSES)) // islands)
    if islands > 1:
        run = _for_islands(run, choices)
    look = partial(_documents, run, shape, opened)
    layout = close_mesh(run, shape, device, room, world, choices, [workspace / "hardware"], look)
    if layout.sizes.pp > 1:
        refuse_schedule(layout.schedule)
    world = layout.sizes.world
    here = here or int(os.environ.get("LOCAL_WORLD_SIZE", world * islands))
    if run.unplanned is None:
        _refuse_what_cannot_fit(run, shape, layout.sizes, device, here / (world * islands))
    shared = f"{cores} core{'s' * (cores > 1)} for {here} process{'es' * (here > 1)}"
    threads = choose("resources.threads", run.resources.threads, max(1, cores // here), shared)
    precision = choose(
        "train.precision", run.train.precision, "bf16" if device == "cuda" else "fp32", f"the usual on {device}"
    )
    if precision == "fp8":
        tokens = layout.micro_batch * run.data.seq_len // layout.sizes.cp
        eight_bits.check(shape, layout.sizes.tp > 1, tokens)
    if wrong := problem(precision, run.eval.precision):
        raise SpecError(f"{wrong}.")
    evaluated = evaluated_in(precision, run.eval.precision)
    if run.data.eval and evaluated != precision:
        choose("eval.precision", run.eval.precision, evaluated, "what fp8 has learned is used in 16 bits")
    compiled = choose("train.compile", run.train.compile, *_compiled(run, device, layout.schedule))
    kernels = choose("train.kernels", run.train.kernels, *kernels_for(device))
    refuse_what_these_cannot(device, precision, kernels)
    settled = {"precision": precision, "compile": compiled, "kernels": kernels}
    model = run.model if unknown else with_balancing(with_rule(run.model, run.train.optimizer.name))
    closed = run.model_copy(
        update={
            "model": model.model_copy(update={"vocab_size": vocab}),
            "train": run.train.model_copy(update=settled),
            "eval": run.eval.model_copy(update={"precision": evaluated}),
            "mesh": closed_mesh(run.mesh, layout),
            "resources": run.resources.model_copy(update={"device": device, "processes": world, "threads": threads}),
        }
    )
    reduce = _reduce(closed, shape, choices, here)
    closed = closed.model_copy(update={"mesh": closed.mesh.model_copy(update={"reduce": reduce})})
    recompute = _recompute(closed, shape, choices, here)
    closed = closed.model_copy(update={"mesh": closed.mesh.model_copy(update={"recompute": recompute})})
    if device == "cuda" and run.unplanned is None:
        # Where windows at once are ours to choose, a restart that ran out of memory takes fewer of them.
        fewer = [1] if run.mesh.micro_batch == "auto" else []
        meshes = [closed.mesh.model_copy(update={"micro_batch": n}) for n in (layout.micro_batch, *fewer)]
        _refuse_what_no_gpu_here_holds([closed.model_copy(update={"mesh": mesh}) for mesh in meshes], shape, here)
    return Decided(closed, world, tuple(choices.made))


def _compiled(run: Run, device: str, schedule: str) -> tuple[bool, str]:
    if device == "cpu":
        return False, "a CPU gains nothing by it"
    if run.model.experts is not None:
        return False, "experts gain little by it"
    if run.foreign is not None:
        return False, "whether a model that is not Shoal's can be is not known"
    if schedule == "zbv":
        return False, "zbv takes a block's backward pass in two halves"
    return True, "a GPU"


def _recompute(run: Run, shape: Shape, choices: Choices, here: int) -> str:
    if run.mesh.recompute != "auto":
        return run.mesh.recompute
    if run.unplanned is not None:
        return choices.choose("mesh.recompute", "auto", "none", run.unplanned)
    from shoal.plan.memory import choose_recompute, memory_budget

    mode, why = choose_recompute(run, shape, memory_budget(run.resources.device, here))
    return choices.choose("mesh.recompute", "auto", mode, why)


def _reduce(run: Run, shape: Shape, choices: Choices, here: int) -> str:
    """Where no planner has said it. With each micro-batch it sends that much more, and only memory is a reason to."""
    sizes, named = Sizes.of(run.mesh), run.mesh.reduce
    if not sizes.reduces_by_micro_batch:
        if named == "micro_batch":
            raise SpecError(ONLY_FSDP_SCATTERS)
        return named
    if named != "auto":
        return named
    if run.unplanned is not None:
        return "step"
    from shoal.plan.memory import choose_reduce, memory_budget

    way, why = choose_reduce(run, shape, memory_budget(run.resources.device, here))
    return choices.choose("mesh.reduce", "auto", way, why) if why else way


def _for_islands(run: Run, choices: Choices) -> Run:
    """Several shards for each island, so that the others can share those of one that is gone. No copies inside one."""
    if run.mesh.dp_replicate == "auto":
        run = run.model_copy(update={"mesh": run.mesh.model_copy(update={"dp_replicate": 1})})
    if run.fleet.shards != "auto":
        return run
    islands, batch = run.fleet.islands, run.train.batch
    count = shards(run)
    if count is None:
        raise SpecError(
            f"train.batch {batch} cannot be cut into shards for {islands} islands: take "
            f"{max(1, batch // islands) * islands} or {(batch // islands + 1) * islands}, or set fleet.shards to a "
            f"divisor of it that is not below {islands}."
        )
    choices.choose("fleet.shards", "auto", count, f"{count // islands} for each of {islands} islands")
    return run.model_copy(update={"fleet": run.fleet.model_copy(update={"shards": count})})


def _refuse_what_cannot_fit(run: Run, shape: Shape, sizes: Sizes, device: str, here: float) -> None:
    """Weights, gradients and optimizer state alone; a proper plan comes with the planner, but this much is certain.

    Every axis but dp_replicate holds a part of one copy, so the machine holds as many copies as that, of each island;
    of a run over several machines its share of them (`here`).
    """
    if device != "cpu":
        return  # the plan knows better what a GPU must hold, once nothing is left open
    islands, saved = run.fleet.islands, 4 if run.train.optimizer.moments == "bf16" else 0
    need = round(shape.params * (STATE_BYTES - saved) * sizes.dp_replicate * islands * here)
    have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if need > have:
        many = sizes.dp_replicate * islands
        copies = f" in {many} copies" if many > 1 else ""
        fewer = "mesh.dp_replicate" if islands == 1 else "fleet.islands"
        raise SetupError(
            f"{shape.params:,} parameters need at least {need / 1e9:,.0f} GB for weights, gradients and optimizer"
            f"{copies}, and this machine has {have / 1e9:,.0f} GB: "
            + (f"set {fewer} to 1." if need / many <= have else "take a smaller model.")
        )


def _refuse_what_no_gpu_here_holds(ways: Sequence[Run], shape: Shape, here: int) -> None:
    """What is predicted to need more than all of a GPU's memory in any of these ways. Between that and the share which
    plans fill it may still go, and starts: predictions are off by some percent."""
    from shoal.plan.memory import USABLE, memory, memory_budget

    budget = memory_budget("cuda", here)
    need = min((memory(run, shape) for run in ways), key=lambda one: one.total)
    if budget is None or need.total <= budget / USABLE:
        return
    parts = {"weights": need.weights, "optimizer": need.optimizer, "gradients": need.gradients}
    parts |= {"gathered weights": need.gathered, "activations": need.activations, "work": need.working}
    named = ", ".join(f"{name} {size / 1e9:.3g}" for name, size in parts.items() if size > need.total / 100)
    raise SetupError(
        f"this needs {need.total / 1e9:.3g} GB of each GPU at {need.moment} ({named}), and there are "
        f"{budget / USABLE / 1e9:.3g} GB: raise mesh.dp_shard or mesh.tp, lower mesh.micro_batch, or set "
        "mesh.recompute to full; `shoal plan` lists what fits."
    )


def _documents(run: Run, shape: Shape, opened: Sequence[TokenShards]) -> Documents:
    from shoal.data.documents import measured

    return measured(run, shape, opened)


def _look_at_data(run: Run, workspace: Path) -> list[TokenShards]:
    """The data, opened. What is wrong with it is better said now than by every worker."""
    from shoal.data.sources import open_sources
    from shoal.data.windows import Windows

    opened = open_sources((*run.data.train, *run.data.eval), run.data, workspace)
    if opened:
        Windows.of(opened, run.data)
    return opened

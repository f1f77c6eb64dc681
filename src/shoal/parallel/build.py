"""Lays a plain decoder over the mesh, axis by axis, from the innermost out.

Everything is declared on the meta device; memory is taken last. No process ever holds weights that are not its own.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from shoal import kernels
from shoal.errors import SpecError
from shoal.model import documents, exact, foreign, fp8
from shoal.model.attention import attention_mask, one_kind_of_mask
from shoal.model.decoder import Block, Decoder
from shoal.model.objective import install, objective_of
from shoal.model.own_model import OwnModel, digest
from shoal.model.seen import seen
from shoal.own.code import NONE, Code
from shoal.parallel import agree, class_tensor, class_tried, context, expert, recompute, tensor
from shoal.parallel.laid import Chosen, Laid
from shoal.parallel.pipeline import Pipeline
from shoal.parallel.place import Place
from shoal.parallel.shard import replicate, shard, sharded
from shoal.parallel.tied_embedding import Tied
from shoal.same_bits import same_bits
from shoal.spec.eight_bits import head_in_8_bits
from shoal.spec.mesh import Sizes
from shoal.spec.precision import evaluated_in
from shoal.spec.run import Run
from shoal.spec.shape import Shape, shape_of
from shoal.spec.stages import stages_of, stretches


def build(run: Run, place: Place, several: bool = False, code: Code = NONE) -> Laid:
    """The model of a run with nothing left open, with its initial weights, ready for `backward`. Collective.

    `several`: rows of its data may hold several documents. What is compiled is then made for masks alone, though a
    batch here and there needs none: each rank meets its first batch of the other kind at another step, and all others
    would wait while it compiles for that one, too. Without documents it is made for none, which is faster.
    """
    kernels.allow(run.train.kernels != "plain")
    if run.train.kernels == "exact":
        _refuse_inexact(run)
    if run.foreign is not None:
        return _foreign(run, place, several, code)
    shape = shape_of(run.model)
    bf16 = run.train.precision != "fp32"
    method = cast(context.Method, run.mesh.cp_method)  # stays open where no sequence is shared
    numbers, layers = _stages(run, shape, place)
    block, objective = _block(code), objective_of(code.objective, run)
    if objective and not objective.per_token and place.sizes.cp > 1:
        raise SpecError(
            "own.objective sees a part of each row where mesh.cp is above 1: set its per_token, or mesh.cp=1."
        )
    by_zero = run.engine.name == "deepspeed"
    one_mask = several and (run.train.compile is True or place.device.type == "cuda")
    decoders = []
    for number in numbers:
        with torch.device("meta"):
            decoder = Decoder(shape, layers[number], block)
        _split(decoder, run, place)
        if bf16 and (by_zero or not sharded(place)):
            _autocast(decoder, place.device)
        if decoder.last:
            decoder.head.z_loss = run.train.z_loss
            if objective:
                install(decoder.head, objective)
        if one_mask and decoder.mask is attention_mask:
            decoder.mask = one_kind_of_mask
        if by_zero:
            return _by_zero(run, place, decoder, block, objective=objective, one_mask=one_mask)
        shard(decoder, place, bf16)
        decoder.to_empty(device=place.device)
        decoder.init_weights(run.seed)
        if run.train.kernels == "exact":
            exact.apply(decoder)
        decoders.append(decoder)
    module = replicate(decoders[0], place)
    eight_bits_rest = run.train.precision == "fp8" and evaluated_in("fp8", run.eval.precision) != "fp8"
    about: dict[str, Any] = {"eight_bits_rest": eight_bits_rest, "objective": objective, "one_mask": one_mask}
    if place.sizes.pp == 1:
        each = run.mesh.reduce == "micro_batch"
        return Laid(place, tuple(decoders), module, method, reduce_each=each, **about)
    micro_batches = run.shard // place.sizes.dp // int(run.mesh.micro_batch)
    hidden = torch.bfloat16 if bf16 else torch.float32
    pipeline = Pipeline(decoders, numbers, len(layers), place, str(run.mesh.schedule), micro_batches, hidden)
    tied = Tied.of(decoders, place)
    return Laid(place, tuple(decoders), module, method, pipeline, tied, **about)


def _refuse_inexact(run: Run) -> None:
    """What computes a token together with others, or in another way."""
    sizes = Sizes.of(run.mesh)
    for asked, why in (
        (sizes.tp > 1, "mesh.tp cuts its products"),
        (sizes.cp > 1, "mesh.cp cuts its texts"),
        (sizes.ep > 1, "mesh.ep sends tokens to others' experts"),
        (run.train.compile is True, "train.compile makes other code of it"),
        (run.engine.name == "deepspeed", "engine deepspeed computes it"),
        (run.foreign is not None, f"{run.foreign} is not Shoal's model"),
        (run.own.block is not None, "own.block is not Shoal's"),
    ):
        if asked:
            raise SpecError(f"train.kernels exact is not possible here: {why}.")


def _by_zero(run: Run, place: Place, decoder: Decoder, block: type[Block], **about: Any) -> Laid:
    from shoal.parallel.zero.laid import lay  # DeepSpeed is imported where it is asked for alone

    return lay(run, place, decoder, block, **about)


def _foreign(run: Run, place: Place, several: bool, code: Code) -> Laid:
    """A model that is not Shoal's, over dp_replicate and dp_shard; a class of transformers over tp, too."""
    bf16, objective = run.train.precision != "fp32", objective_of(code.objective, run)
    shape = shape_of(run.model)
    model = foreign.made(run, shape, code, objective)
    tokens_see = seen(model, run.data.seq_len)
    if tokens_see.after and objective is None:
        raise SpecError(f"a token of {run.foreign} sees those after it, and would learn to copy them: mask them.")
    if several and tokens_see.before:
        hint = "give its forward the argument `documents` ([batch, seq], a number for each), or " * (
            code.model is not None
        )
        raise SpecError(
            f"{run.foreign} does not keep documents apart, and rows of this data hold several: {hint}set "
            "data.mask_documents=false."
        )
    if len(set(agree.texts(str(digest(model))))) > 1:
        raise SpecError(
            f"{run.foreign} starts with other numbers in other processes: draw them from torch's generator, which is "
            "seeded, and from nothing else."
        )
    chosen = _cut_by_its_plan(model, run, place)
    recompute.apply(model, cast(recompute.Mode, run.mesh.recompute), random=True)
    if run.train.compile is True:
        for block in model.blocks.values():
            block.compile(options=same_bits())
    if bf16 and not sharded(place):
        _autocast(model, place.device)
    shard(model, place, bf16)
    model.to(place.device)
    each = run.mesh.reduce == "micro_batch"
    about: dict[str, Any] = {"objective": objective, "one_mask": several, "reduce_each": each, "chosen": chosen}
    return Laid(place, (model,), replicate(model, place), "ring", **about)


def _cut_by_its_plan(model: OwnModel, run: Run, place: Place) -> tuple[Chosen, ...]:
    size = place.sizes.tp
    if size == 1:
        return ()
    assert place.dense is not None
    mesh, called = place.dense["tp"], str(run.foreign)
    was = class_tried.whole(model, run.data.seq_len)
    cut = class_tensor.split(model, mesh, called)
    if cut.packed and run.train.optimizer.moments == "bf16":
        raise SpecError(
            f"train.optimizer.moments bf16 is rounded by the place of a number, and mesh.tp cuts {cut.packed} of "
            f"{called} in two stretches: take fp32, or dp_shard."
        )
    model.to(place.device)  # buffers; of the parameters the parts are there
    class_tried.refuse_other(model, was, mesh, called)
    return (("mesh.tp", size, f"the plan of {called} cuts {cut}"),)


def _block(code: Code) -> type[Block]:
    if code.block is None:
        return Block
    if not (isinstance(code.block, type) and issubclass(code.block, Block)):
        raise SpecError("own.block must be a class, and a subclass of shoal.Block.")
    return code.block


def _stages(run: Run, shape: Shape, place: Place) -> tuple[list[int], list[range]]:
    """The stages that this process holds, and the layers of every stage."""
    if place.sizes.pp == 1:
        return [0], [range(shape.layers)]
    schedule = str(run.mesh.schedule)
    cut = stretches(shape, place.sizes.pp, schedule, run.data.seq_len)
    return stages_of(place.at["pp"], place.sizes.pp, schedule), cut


def _split(decoder: Decoder, run: Run, place: Place) -> None:
    """Every axis inside a layer, then how it is computed, what is computed twice and what is compiled."""
    tensor.split(decoder, place)
    expert.split(decoder, place)
    context.split(decoder, place, cast(context.Method, run.mesh.cp_method))
    if run.train.precision == "fp8":
        fp8.apply(decoder, place.device, head_in_8_bits(run, decoder.shape), run.train.fp8_scaling)
    fast = place.device.type == "cuda" and run.train.kernels != "plain" and run.train.precision != "fp32"
    if fast and place.sizes.cp == 1:
        documents.apply(decoder)
    recompute.apply(decoder, cast(recompute.Mode, run.mesh.recompute), random=run.own.block is not None)
    if run.train.compile is True:
        for block in decoder.blocks.values():
            block.compile(options=same_bits())


def _autocast(decoder: Decoder, device: torch.device) -> None:
    """Computes in bfloat16 from float32 master weights. FSDP2 casts its own shards instead."""
    inner = decoder.forward

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            return inner(*args, **kwargs)

    decoder.forward = forward  # type: ignore[method-assign]  # on this one decoder

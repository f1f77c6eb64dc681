"""Which models can be computed in 8 bits (`train.precision: fp8`)."""

from __future__ import annotations

from shoal.errors import SpecError
from shoal.spec.mixers import KINDS
from shoal.spec.run import Run
from shoal.spec.shape import Shape

ALIGN = 16  # the sides of a matrix are multiples of it, or the tensor cores do not take it


def head_in_8_bits(run: Run, shape: Shape) -> bool:
    """Whether the output layer is computed in them too: a vocabulary of another size leaves it in 16 bits."""
    return (
        run.train.precision == "fp8" and run.train.fp8_head and not run.own.objective and shape.vocab_size % ALIGN == 0
    )


def check(shape: Shape, tensor_parallel: bool, tokens: int = 0) -> None:
    """Raises SpecError. `tokens` are those that a process computes at once, where that is known."""
    if sentence := problem(shape, tensor_parallel, tokens):
        raise SpecError(sentence)


def problem(shape: Shape, tensor_parallel: bool, tokens: int = 0) -> str | None:
    """Why a model cannot be computed in them; None where it can."""
    if tensor_parallel:
        return "train.precision fp8 and mesh.tp above 1 do not go together yet: take bf16, or tp 1."
    for kind in shape.mixers:
        if not KINDS[kind].IN_8_BITS:
            return f"train.precision fp8 does not compute the layers of model.{kind} yet: take bf16."
    sides = {
        "model.dim": shape.dim,
        "model.heads x head_dim": shape.q_dim,
        "model.kv_heads x head_dim": shape.kv_dim,
        "model.ffn_dim": shape.ffn_dim,
        "mesh.micro_batch x data.seq_len (/ cp)": tokens,
    }
    for name, side in sides.items():
        if side % ALIGN:
            return (
                f"train.precision fp8 needs matrices whose sides are multiples of {ALIGN}, and {name} is {side}: "
                f"make it {round(side / ALIGN) * ALIGN or ALIGN}, or take bf16."
            )
    return None

"""A model whose blocks write into a small subspace, so that between stages only coordinates in it need to travel.

After "Protocol Models" (arXiv:2506.01260), parametrised instead of projected. A fixed orthonormal basis U [dim, rank]
is drawn from the seed. Every block's output matrices are U·A with A [rank, ·] trained, and the embedding is a fixed
random table plus U·B with B trained. The residual stream at any cut is then

    h = table[token] + U·c

with c [rank] the sum of all that was written: c travels, tokens are known to all, and h is exact. Backwards, all that
is trained upstream reaches h through c alone, so Uᵀ·gradient is exact as well. Nothing is lost on the way; what it
costs is in the model, whose residual stream is written in `rank` dimensions only. Multiplied out (`whole`), the model
is a plain Llama again, and any tool reads it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from shoal.errors import SpecError
from shoal.model.decoder import Block, Decoder
from shoal.model.init import init_weights
from shoal.spec.shape import Shape


def basis(dim: int, rank: int, seed: int) -> Tensor:
    """U [dim, rank], the same on all peers: float64 and one thread's algorithm, rounded at the end."""
    if not 0 < rank <= dim:
        raise SpecError(f"a subspace of {rank} dimensions does not fit into a model of {dim} (swarm.stages.rank).")
    numbers = torch.empty(dim, rank, dtype=torch.float64).normal_(generator=torch.Generator().manual_seed(seed))
    for i in range(rank):  # modified Gram-Schmidt: a fixed order of sums, where LAPACK's depends on the machine
        numbers[:, i] /= numbers[:, i].norm()
        numbers[:, i + 1 :] -= numbers[:, i, None] * (numbers[:, i] @ numbers[:, i + 1 :])[None]
    return numbers.float()


class Space:
    """What all stages have in common: the basis, and the fixed part of the embedding, both from the seed. No buffers
    of a module, as nothing of it is trained, saved or initialised with the rest."""

    def __init__(self, shape: Shape, rank: int, seed: int, device: torch.device | str) -> None:
        if shape.experts is not None or shape.out_bias or shape.mlp_bias or shape.tie_embeddings:
            raise SpecError(
                "swarm.stages.rank needs a dense model without biases on its outputs and with a head of its own "
                "(model.tie_embeddings: false): set swarm.stages.rank to 0 or change the model."
            )
        self.u = basis(shape.dim, rank, seed).to(device)  # [dim, rank]
        holder = nn.Module()
        holder.embed = nn.Embedding(shape.vocab_size, shape.dim)
        init_weights(holder, shape, seed)
        self.table = holder.embed.weight.detach().to(device)  # [vocab, dim]: what the whole model would begin with

    def narrow(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """The coordinates [..., rank] that travel forwards."""
        return (hidden - functional.embedding(tokens, self.table)) @ self.u

    def widen(self, coordinates: Tensor, tokens: Tensor) -> Tensor:
        return functional.embedding(tokens, self.table) + coordinates @ self.u.T


class Confined(nn.Module):
    """In the place of an output matrix: the coordinates, trained, and the basis, fixed."""

    def __init__(self, inputs: int, space: Space) -> None:
        super().__init__()
        self.space = space
        self.weight = nn.Parameter(torch.empty(space.u.shape[1], inputs))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(functional.linear(x, self.weight), self.space.u)


class Lookup(nn.Module):
    """In the place of the embedding: a fixed row a token, and coordinates, trained."""

    def __init__(self, vocab: int, space: Space) -> None:
        super().__init__()
        self.space = space
        self.weight = nn.Parameter(torch.empty(vocab, space.u.shape[1]))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.space.widen(functional.embedding(tokens, self.weight), tokens)


def confine(decoder: Decoder, space: Space) -> None:
    """Puts the confined modules in place; before `init_weights`, which fills them as it would the others."""
    shape = decoder.shape
    if decoder.first:
        decoder.embed = Lookup(shape.vocab_size, space)  # type: ignore[assignment]  # called the same way
    for block in decoder.blocks.values():
        assert isinstance(block, Block)
        out = block.mixer.get_submodule("out")
        assert isinstance(out, nn.Linear)
        block.mixer.out = Confined(out.in_features, space)
        block.ffn.down = Confined(shape.ffn_dim, space)


EMBEDDING, OUTPUTS = "embed.weight", (".out.weight", ".ffn.down.weight")  # what `confine` puts in place, by name


@torch.no_grad()
def multiplied(name: str, weight: Tensor, space: Space) -> Tensor:
    """What a parameter of a confined model is in a plain one that computes the same."""
    if name == EMBEDDING:
        return space.table + weight @ space.u.T
    return space.u @ weight if name.endswith(OUTPUTS) else weight


def multiplied_shape(name: str, shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    if name == EMBEDDING:
        return shape[0], dim
    return (dim, shape[1]) if name.endswith(OUTPUTS) else shape


def whole(decoder: Decoder, space: Space | None) -> dict[str, Tensor]:
    """The parameters of a plain model that computes the same."""
    tensors = {name: p.detach() for name, p in decoder.named_parameters()}
    return tensors if space is None else {name: multiplied(name, t, space) for name, t in tensors.items()}

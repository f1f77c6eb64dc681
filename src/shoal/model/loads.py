"""What the mixtures of a model have counted, layer by layer, and how a step evens out their experts by it.

Tables have a row for every sparse layer of the whole model, zero where another pipeline stage holds it: the sum over
all processes is that of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from shoal.model.moe import MixtureOfExperts
from shoal.spec.shape import Shape


def sparse_layers(decoders: Iterable[nn.Module]) -> Iterator[tuple[int, MixtureOfExperts]]:
    """The mixtures of some stretches of one model, each with its place among all sparse layers."""
    for decoder in decoders:
        for number, block in decoder.blocks.items():  # type: ignore[operator, union-attr]  # a Decoder
            if isinstance(getattr(block, "ffn", None), MixtureOfExperts):
                yield int(number) - block.ffn.spec.dense_layers, block.ffn


def loads(decoders: Iterable[nn.Module]) -> Tensor:
    """Tokens that this process has routed to each expert since the last update: [sparse layers of the model, experts].

    Layers of other pipeline stages are zero, so that the sum over all processes is the load of the whole batch.
    """
    return _table(decoders, lambda layer: layer.load)


def biases(decoders: Iterable[nn.Module]) -> Tensor:
    """The selection biases that this process holds, [sparse layers of the model, experts]; zero elsewhere."""
    return _table(decoders, lambda layer: layer.bias)


def squares(decoders: Iterable[nn.Module]) -> Tensor:
    """The sum over this process's tokens of the squared `levels` of their router logits, [sparse layers, 1]: what the
    z-loss holds down, and the first number to grow when a router loses its footing."""
    return _table(decoders, lambda layer: layer.z[None], width=1)


def _table(
    decoders: Iterable[nn.Module], row: Callable[[MixtureOfExperts], Tensor], width: int | None = None
) -> Tensor:
    """A row for every sparse layer of the whole model, of `width` numbers (else one an expert): as large on a stage
    that holds dense layers only, as the tables of all processes are summed. float64: counts and sums are exact."""
    decoders = list(decoders)
    shape: Shape = decoders[0].shape  # type: ignore[assignment]  # a Decoder's
    device = next(decoders[0].parameters()).device
    rows = {place: row(layer) for place, layer in sparse_layers(decoders)}
    if shape.experts is None:
        return torch.zeros(0, 0, dtype=torch.float64, device=device)
    width = width or shape.experts.count
    table = torch.zeros(shape.layers - shape.experts.dense_layers, width, dtype=torch.float64, device=device)
    for place, values in rows.items():
        table[place] = values
    return table


@torch.no_grad()
def apply_loads(decoders: Iterable[nn.Module], summed: Tensor) -> None:
    """Nudge the biases, and tell the balance loss, by `loads` summed over all processes; start counting anew."""
    for place, layer in sparse_layers(decoders):
        load = summed[place].to(layer.bias.device)
        layer.bias.copy_(balanced(layer.bias, load, float(layer.spec.balance_rate)))
        if layer.excess is not None:
            layer.excess.copy_(excess(load))
    forget_loads(decoders)


@torch.no_grad()
def forget_loads(decoders: Iterable[nn.Module]) -> None:
    """Start counting anew: the step was not taken."""
    for _, layer in sparse_layers(decoders):
        layer.load.zero_()
        layer.z.zero_()


def excess(load: Tensor) -> Tensor:
    """By how much each expert had more than the mean, as a share of the mean: [experts]."""
    return load.double() / load.double().mean().clamp(min=1.0) - 1.0


def weigh_tokens(decoders: Iterable[nn.Module], weight: float) -> None:
    """Say how many targets each counted token of the batch stands for in the routers' own losses."""
    for _, layer in sparse_layers(decoders):
        layer.token_weight = weight


def balanced(bias: Tensor, load: Tensor, rate: float) -> Tensor:
    """A step of fixed size up for experts with less than the mean load, down for those with more; both [experts]."""
    load = load.double()
    step = torch.sign(load.mean() - load).to(bias.dtype)
    return bias + rate * (step - step.mean())  # only differences matter, so the mean must not wander off

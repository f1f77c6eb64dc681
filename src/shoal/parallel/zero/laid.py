"""A model whose gradient, norm and weights are ZeRO's; for the step it is laid out like any other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shoal.data.windows import Batch
from shoal.errors import SpecError
from shoal.model.decoder import Block, Decoder
from shoal.model.init import clear_buffers
from shoal.parallel.clip import clipping, squared
from shoal.parallel.laid import Laid
from shoal.parallel.place import Place
from shoal.parallel.zero.engine import Zero, frozen
from shoal.parallel.zero.shares import dealt, gather, spread
from shoal.spec.run import Run
from shoal.spec.shape import Shape


@dataclass(frozen=True)
class ZeroLaid(Laid):
    zero: Zero = field(kw_only=True)
    block: type[Block] = field(kw_only=True)
    shapes: dict[str, torch.Size] = field(kw_only=True)  # of the whole parameters; ZeRO 3 leaves nothing of them
    owners: dict[str, int] = field(kw_only=True)  # who has which of them whole, for a checkpoint

    def begin(self, seed: int) -> None:
        """Start values. Collective, once ZeRO has its optimizer."""
        self.fill(lambda shares: shares[0].init_weights(seed))

    def fill(self, read: Callable[[tuple[Decoder, ...]], object]) -> None:
        """Whatever fills a decoder fills one that has this process's share of the parameters; then all get them."""
        share = self._share()
        read((share,))
        self._set({name: p.detach() for name, p in share.named_parameters()})

    def backward(
        self, batches: list[Batch], doing: Callable[[str], object] = lambda phase: None, token_weight: float = 1.0
    ) -> Tensor:
        self.zero.open()
        total = torch.zeros((), device=self.place.device)
        for i, batch in enumerate(batches):
            self.zero.accumulate(last=i == len(batches) - 1)
            doing("forward")
            part = self.zero.forward(*self._inputs(batch))
            doing("backward")
            self.zero.backward(part)
            total += part.detach()
        return total

    def gradients(self) -> Iterator[Tensor]:
        return iter(self.zero.pieces.gradients())

    def norm(self, scale: float, limit: float | None) -> tuple[Tensor, Tensor]:
        total = torch.zeros((), dtype=torch.float64, device=self.place.device)
        if grads := self.zero.pieces.gradients():
            total += squared(grads).to(self.place.device)
        return clipping(self.place.sum_on_device(total), scale, limit)

    def gradient_norms(self) -> dict[str, float]:
        return {name: float(self.zero.gradient(p).double().norm()) for name, p in self.named_parameters()}

    # What checkpoints hold

    @property
    def apart(self) -> bool:
        return True

    def saved(self) -> dict[str, Tensor]:
        by_name = dict(self.named_parameters())
        return gather(self.owners, self.place, lambda name: self.zero.weight(by_name[name]))

    def holders(self) -> dict[str, list[int]]:
        return {name: [owner] for name, owner in self.owners.items()}

    def taken(self, tensors: Mapping[str, Tensor]) -> None:
        self._set(tensors)

    def pieces(self) -> Iterator[tuple[str, Tensor]]:
        return ((f"zero.{i}", piece) for i, piece in enumerate(self.zero.pieces.masters()))

    def _set(self, mine: Mapping[str, Tensor]) -> None:
        by_name = dict(self.named_parameters())
        put = self.zero.set_weight
        spread(self.owners, self.shapes, self.place, mine, lambda name, whole: put(by_name[name], whole))
        self.zero.pieces.refresh()

    def _share(self) -> Decoder:
        """A decoder that has some of the parameters, on the CPU, and lacks the others."""
        with torch.device("meta"):
            share = Decoder(self.shape, block=self.block)
        for name, owner in self.owners.items():
            where, _, last = name.rpartition(".")
            module = share.get_submodule(where)
            if owner == self.place.rank:
                module._parameters[last] = nn.Parameter(torch.empty(self.shapes[name], device="cpu"))
            else:
                del module._parameters[last]
        return share


def lay(run: Run, place: Place, decoder: Decoder, block: type[Block], **about: Any) -> ZeroLaid:
    """A decoder on the meta device, over the processes. No weight has a value before `begin`. Collective."""
    if found := next(frozen(decoder), None):
        raise SpecError(
            f"engine.name deepspeed trains all parameters, and {found} is frozen: let it train, or set engine.name to "
            "native."
        )
    if left := sorted(decoder.state_dict().keys() - {name for name, _ in decoder.named_parameters()}):
        raise SpecError(
            f"engine.name deepspeed saves parameters, and {left[0]} is a buffer: make it one that is not persistent, "
            "or set engine.name to native."
        )
    shapes = {name: p.shape for name, p in decoder.named_parameters()}
    params = sum(shape.numel() for shape in shapes.values())
    shape: Shape = decoder.shape
    zero = Zero(run.engine, place, shape.dim, params, int(run.mesh.micro_batch))
    parts = [*decoder.blocks.values(), *(m for name, m in decoder.named_children() if name != "blocks")]
    for part in parts:  # one after the other: with ZeRO 3 nobody ever has the whole
        part.to_empty(device=place.device)
        zero.partition(part)
    clear_buffers(decoder)
    if shape.tie_embeddings:
        zero.share(decoder.head, decoder.embed.weight)
    owners = dealt(shapes, place.world)
    return ZeroLaid(place, (decoder,), decoder, "ring", zero=zero, block=block, shapes=shapes, owners=owners, **about)

"""A model laid over the processes: what this one holds of it, and how a batch runs through all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shoal.data.windows import Batch
from shoal.errors import SpecError
from shoal.model import fp8
from shoal.model.decoder import Decoder
from shoal.model.loads import weigh_tokens
from shoal.model.objective import Objective
from shoal.parallel import context
from shoal.parallel.clip import copies_of, local, norm_and_factor, settled, squared
from shoal.parallel.place import Place
from shoal.parallel.shard import reduce_on, reshard
from shoal.parallel.staging import on_device
from shoal.spec.shape import Shape

if TYPE_CHECKING:
    from shoal.parallel.pipeline import Pipeline
    from shoal.parallel.tied_embedding import Tied


Chosen = tuple[str, object, str]  # a key of the run file, what it is, and why or by what: a `decision` record


@dataclass(frozen=True)
class Laid:
    place: Place
    decoders: tuple[Decoder, ...]  # one; more where a pipeline gives this process several stages
    module: nn.Module  # the first of them as DDP may have wrapped it
    cp_method: context.Method
    pipeline: Pipeline | None = None
    tied: Tied | None = None
    reduce_each: bool = False  # gradients go to their shards with every micro-batch, and not once a step
    eight_bits_rest: bool = False  # products in 8 bits are in 16 where no gradient is taken
    objective: Objective | None = None  # of somebody's own
    one_mask: bool = False  # attention is told of documents in every batch, also where each row has one
    chosen: tuple[Chosen, ...] = ()  # what was found out of the model when it was laid out

    @property
    def shape(self) -> Shape:
        return self.decoders[0].shape

    @property
    def at_once(self) -> int:
        """Micro-batches that `loss` takes: a pipeline always runs as many as it was made for."""
        return 1 if self.pipeline is None else self.pipeline.micro_batches

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What the optimizer updates, by the names that checkpoints use."""
        for decoder in self.decoders:
            for name, parameter in decoder.named_parameters():
                if self.tied is None or parameter is not self.tied.local_copy:
                    yield name, parameter

    def fill(self, read: Callable[[tuple[Decoder, ...]], object]) -> None:
        """With weights that `read` puts into decoders. Collective."""
        read(self.decoders)

    def gradients(self) -> Iterator[Tensor]:
        """What this process holds of the gradient."""
        return (local(p.grad) for _, p in self.named_parameters() if p.grad is not None)

    def pieces(self) -> Iterator[tuple[str, Tensor]]:
        """What this process holds of the parameters, by names of its own."""
        return ((name, local(p)) for name, p in self.named_parameters())

    @property
    def apart(self) -> bool:
        """Whether processes save tensors that others do not have."""
        return self.pipeline is not None

    def saved(self) -> dict[str, Tensor]:
        """Parameters and buffers that make up the model, by name."""
        saved = {name: p.detach() for name, p in self.named_parameters()}
        for decoder in self.decoders:
            lasting = decoder.state_dict().keys()
            saved |= {name: buffer for name, buffer in decoder.named_buffers() if name in lasting}
        return saved

    def holders(self) -> dict[str, list[int]]:
        """Of each tensor of `saved`, the ranks that may write it: those of the stage that owns it."""
        peers = self.place.world // self.place.sizes.pp
        mine = range(self.place.at["pp"] * peers, (self.place.at["pp"] + 1) * peers)
        owners = {name: list(mine) for name in self.saved()}
        if self.tied is not None and self.tied.borrowed:
            owners["embed.weight"] = list(range(peers))  # the first stage's
        return owners

    def count(self, batch: Batch) -> int:
        """What the loss of a batch is divided by: its targets, or what an own loss says."""
        if self.objective is None:
            return batch.target_count
        found = self.objective.count(batch)
        if found != int(found) or found < 0:
            raise SpecError(f"own.objective counts {found}; it must be a whole number of at least 0.")
        return int(found)

    def backward(
        self, batches: list[Batch], doing: Callable[[str], object] = lambda phase: None, token_weight: float = 1.0
    ) -> Tensor:
        """Adds up the gradients of the loss summed over all targets; returns this process's part of that sum. `doing`
        is told what comes next. `token_weight`: targets for each counted token of the whole batch, by which routers
        weigh losses of their own."""
        weigh_tokens(self.decoders, token_weight)
        if self.pipeline is not None:
            doing("compute")
            return self.pipeline.backward(*self._inputs(_joined(batches)))
        total = torch.zeros((), device=self.place.device)
        for i, batch in enumerate(batches):
            with reduce_on(self.module, last=i == len(batches) - 1, each=self.reduce_each):
                doing("forward")
                part = self.module(*self._inputs(batch))
                doing("backward")
                part.backward()
            total += part.detach()
        return total

    @torch.no_grad()
    def loss(self, batches: list[Batch]) -> Tensor:
        """The same sum without gradients."""
        for decoder in self.decoders:
            decoder.eval()
        with fp8.paused(self.decoders) if self.eight_bits_rest else nullcontext():
            if self.pipeline is not None:
                total = self.pipeline.loss(*self._inputs(_joined(batches)))
            else:
                total = torch.zeros((), device=self.place.device)
                for batch in batches:
                    total += self.module(*self._inputs(batch))
        for decoder in self.decoders:
            reshard(decoder)
            decoder.train()
        return total

    def total(self, loss: Tensor) -> Tensor:
        """The sum of what `backward` or `loss` returned on all processes; tensor-parallel peers have the same part."""
        return self.place.sum_on_device(loss) / self.place.sizes.tp

    def norm(self, scale: float, limit: float | None) -> tuple[Tensor, Tensor]:
        """The gradients' global norm after `scale`, the same number on every layout, and the factor that scales and
        clips them; multiplying is left to the optimizer, which reads them anyway."""
        if self.tied is not None:
            self.tied.sum_gradients()
        if isinstance(self.module, DistributedDataParallel):
            scale *= self.place.world  # DDP has divided by it
        peers = self.place.world // self.place.sizes.pp
        counted = ((p, self._copies(name, p, peers)) for name, p in self.named_parameters())
        return norm_and_factor(counted, self.place, scale, limit)

    def gradient_norms(self) -> dict[str, float]:
        """Of every parameter, the norm of its gradient, summed over the targets of the whole batch: the same numbers on
        every process and layout. For hooks, before an update; a tied embedding that two stages hold is left out.
        Collective, and the host waits for it."""
        scale = self.place.world if isinstance(self.module, DistributedDataParallel) else 1
        held = {name: p for name, p in self.named_parameters() if self.tied is None or name != "embed.weight"}
        peers = self.place.world // self.place.sizes.pp
        squares = torch.zeros(len(self._names), dtype=torch.float64, device=self.place.device)
        for i, name in enumerate(self._names):
            if name in held and (grad := settled(held[name])) is not None:
                squares[i] = squared([grad]) / self._copies(name, held[name], peers)
        return dict(zip(self._names, (self.place.sum_on_device(squares).sqrt() * scale).tolist(), strict=True))

    @cached_property
    def _names(self) -> list[str]:
        """Of the parameters of all stages."""
        mine = [name for name, _ in self.named_parameters() if self.tied is None or name != "embed.weight"]
        if self.place.sizes.pp == 1:
            return mine
        gathered: list[list[str]] = [[] for _ in range(self.place.world)]
        dist.all_gather_object(gathered, mine)
        return list(dict.fromkeys(name for names in gathered for name in names))

    def taken(self, tensors: Mapping[str, Tensor]) -> None:
        """What was restored into the tensors of `saved`, which are the parameters themselves here. Collective."""

    def spread(self) -> None:
        """Brings a second copy of a tied embedding in line, after an update or a restore."""
        if self.tied is not None:
            self.tied.spread()

    def _copies(self, name: str, parameter: nn.Parameter, peers: int) -> int:
        twice = self.tied is not None and self.tied.local_copy is None and name == "embed.weight"
        return copies_of(parameter, peers) * (2 if twice else 1)

    def _inputs(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None]:
        """(tokens, positions, documents, targets, padding) as a Decoder takes them, on the device."""
        arrays: list[np.ndarray] = [batch.tokens, batch.positions, batch.targets]
        padding = None if self.shape.experts is None else batch.padding
        arrays += [] if padding is None else [padding]
        if self.place.sizes.cp > 1:
            arrays = [context.cut(a, self.place, self.cp_method) for a in arrays]
        apart = self.one_mask or batch.documents.any()
        found = on_device([*arrays, *([batch.documents] if apart else [])], self.place.device)
        tokens, positions, targets = found[:3]
        return tokens, positions, found[-1] if apart else None, targets, None if padding is None else found[3]


def _joined(batches: list[Batch]) -> Batch:
    return Batch(**{name: np.concatenate([getattr(b, name) for b in batches]) for name in Batch.__dataclass_fields__})

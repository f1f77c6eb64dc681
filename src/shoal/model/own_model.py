"""A model that is not Shoal's: any torch module that turns tokens into logits, with the surface of a decoder.

It is built on the CPU in every process, from the run's seed, so that its start values are those that its own
constructor gives it, whatever the layout; FSDP then keeps a process's part. So a process needs memory for the whole
once, at the start.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
import xxhash
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.errors import SpecError
from shoal.model.decoder import Decoder
from shoal.model.head import NO_TARGET
from shoal.model.init import fill
from shoal.model.objective import Objective, checked
from shoal.model.packed import in_parts
from shoal.spec.run import Run
from shoal.spec.shape import Shape

TOLD = ("positions", "documents")  # what a model is told besides tokens, if its forward has a place for it


class Way(Protocol):
    """How a net is asked."""

    called: str  # the key of the run file that names it

    def logits(self, net: nn.Module, tokens: Tensor, positions: Tensor, documents: Tensor | None) -> Any:
        """Of tokens [batch, seq]: [batch, seq, vocab]."""
        ...

    def loss(
        self, net: nn.Module, tokens: Tensor, positions: Tensor, documents: Tensor | None, targets: Tensor
    ) -> Tensor | None:
        """The sum of cross-entropy without holding all logits; None where it is taken from them."""
        ...


class OwnModel(Decoder):
    """`net` inside of what Shoal asks of a model. Its parameters keep their names, behind `net.`."""

    def __init__(
        self, make: Callable[[], nn.Module], shape: Shape, way: Way, objective: Objective | None = None
    ) -> None:
        nn.Module.__init__(self)  # nothing of a decoder's is built
        self.net = make()
        self._make, self.way, self._objective, self.shape = make, way, objective, shape
        self.first = self.last = True
        self.passes, self.timer = None, None
        blocks = blocks_of(self.net)
        self.layers = range(len(blocks))
        # Past torch's registration: they are the net's, by the names that it gives them.
        object.__setattr__(self, "blocks", nn.ModuleDict({str(i): block for i, block in enumerate(blocks)}))
        for block in blocks:  # a compiled block has its hooks inside it; these are not compiled
            block.register_forward_pre_hook(torch.compiler.disable(self._enter))
            block.register_forward_hook(torch.compiler.disable(self._leave))

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        targets: Tensor | None = None,
        padding: Tensor | None = None,
    ) -> Tensor:
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device).expand_as(x)
        if targets is not None and self._objective is None:
            summed = self.way.loss(self.net, x, positions, documents, targets)
            if summed is not None:
                return summed
        logits = self.way.logits(self.net, x, positions, documents)
        wanted = (*x.shape, self.shape.vocab_size)
        if not isinstance(logits, Tensor) or logits.shape != wanted:
            gave = f"a tensor of shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
            raise SpecError(f"{self.way.called} gave {gave} of tokens {tuple(x.shape)}; it must give logits {wanted}.")
        if targets is None:
            return logits
        with torch.autocast(logits.device.type, enabled=False):
            if self._objective is not None:
                return checked(self._objective.loss(logits.float(), targets))
            rows = logits.float().flatten(0, -2)
            return F.cross_entropy(rows, targets.flatten(), ignore_index=NO_TARGET, reduction="sum")

    def init_weights(self, seed: int) -> None:
        """As they were made."""
        self.take(self._make())

    def take(self, other: nn.Module) -> None:
        """The numbers of another net of the same kind, which is whole and on the CPU."""
        for (_, mine), (_, fresh) in zip(_tensors(self.net), _tensors(other), strict=True):
            if isinstance(mine, DTensor):
                fill(mine, partial(_rows, in_parts(fresh.detach(), mine)))
            else:
                mine.detach().copy_(fresh.detach())

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """With what a checkpoint holds of it; a matrix that has two names in the net is saved once."""
        held: dict[str, Tensor] = dict(self.named_parameters())
        held |= {name: buffer for name, buffer in self.named_buffers() if name in self.state_dict()}
        if wrong := sorted(held.keys() ^ tensors.keys()):
            raise SpecError(
                f"{self.way.called} and the checkpoint do not have the same tensors: {wrong[0]} is in one alone."
            )
        for name, mine in held.items():
            if mine.shape != tensors[name].shape:
                shapes = f"{tuple(mine.shape)}, and {tuple(tensors[name].shape)} was saved"
                raise SpecError(f"{self.way.called}: {name} has shape {shapes}.")
            mine.detach().copy_(tensors[name])

    def _enter(self, block: nn.Module, args: Any) -> None:
        if self.timer is not None:
            self.timer.enter()

    def _leave(self, block: nn.Module, args: Any, given: Any) -> None:
        if self.timer is not None:
            self.timer.leave()
        first = given[0] if isinstance(given, tuple) and given else given
        if self.passes is not None and isinstance(first, Tensor):
            self.passes(first)


class BySignature:
    """As its forward asks for it: tokens, and by their names positions and documents."""

    called = "own.model"

    def logits(self, net: nn.Module, tokens: Tensor, positions: Tensor, documents: Tensor | None) -> Any:
        given = {"positions": positions, "documents": documents}
        return net(tokens, **{name: given[name] for name in told_to(net)})

    def loss(self, *args: Any) -> None:
        return None


def maker(make: Callable[[Run], Any], run: Run, called: str) -> Callable[[], nn.Module]:
    """Makes the net of a run: the same numbers in every process, and each time. `called`: as the run file names it."""

    def made() -> nn.Module:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(run.seed)
            net = make(run)
        if not isinstance(net, nn.Module):
            raise SpecError(f"{called} must be a torch.nn.Module, or make one; it made {type(net).__name__}.")
        if net.training is False:
            net.train()
        for name, p in net.named_parameters():
            if p.device.type != "cpu" or p.dtype != torch.float32:
                raise SpecError(
                    f"{called}: {name} is {p.dtype} on {p.device}; make it float32 on the CPU "
                    "(train.precision says in what it computes)."
                )
        if not any(p.requires_grad for p in net.parameters()):
            raise SpecError(f"{called} has no parameter to train.")
        return net

    return made


def blocks_of(net: nn.Module) -> list[nn.Module]:
    """What is sharded, recomputed and compiled one by one: its `blocks`, else the largest list of modules in it, else
    the net as one."""
    named = getattr(net, "blocks", None)
    if isinstance(named, nn.ModuleDict):
        return list(named.values())
    if isinstance(named, nn.ModuleList | list | tuple) and named and all(isinstance(b, nn.Module) for b in named):
        return list(named)
    lists = sorted((_numbers(m), i) for i, m in enumerate(net.modules()) if isinstance(m, nn.ModuleList) and len(m))
    return list(list(net.modules())[lists[-1][1]].children()) if lists else [net]


def _rows(whole: Tensor, shape: torch.Size, rows: slice) -> Tensor:
    return whole[rows]


def _numbers(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def told_to(net: nn.Module) -> tuple[str, ...]:
    """Which of `TOLD` its forward takes, by name."""
    known = inspect.signature(net.forward).parameters
    return tuple(name for name in TOLD if name in known)


def digest(model: nn.Module) -> int:
    """Of all numbers of a model that is not laid out yet, as they lie in memory."""
    found = xxhash.xxh3_64()
    for name, tensor in _tensors(model):
        found.update(name.encode())
        found.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.intdigest() >> 12  # as much as float64 holds


def _tensors(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()

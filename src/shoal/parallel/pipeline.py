"""Runs a batch through a pipeline of stages, forwards and backwards, in torch's schedules.

Every process of the pipeline has the whole batch, so only hidden states (and their gradients) travel: positions,
documents and targets are given to each stage where it is. The last stage ends in the loss, summed over targets, and
gradients of that sum add up over the micro-batches; nothing is averaged.

What this adds to torch.distributed.pipelining:

- Shapes are said, not inferred: torch's inference runs the model on uninitialised numbers, which a router would count.
- A message is received into memory that lives as long as its micro-batch is in flight. torch keeps a buffer for every
  micro-batch of the batch, which undoes what 1F1B is for.
- zbv's backward pass in two halves wants some care: `shoal.parallel.halves`.
- A forward pass by itself (`loss`), for evaluation: torch's fails where a process holds two neighbouring stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from shoal.model.decoder import Decoder
from shoal.parallel.halves import divisible, nothing_later, repeatable
from shoal.parallel.place import Place
from shoal.parallel.shard import sharded_parts
from shoal.spec.stages import stages_of

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zbv": ScheduleZBVZeroBubble,
}


class Pipeline:
    """The stages of this process among those of all the processes along "pp"."""

    def __init__(
        self,
        decoders: Sequence[Decoder],
        numbers: Sequence[int],
        stages: int,
        place: Place,
        schedule: str,
        micro_batches: int,
        dtype: torch.dtype,
    ) -> None:
        """`decoders` are as they will run (split, sharded, on their device), with their stage numbers; `dtype` is what
        travels between stages."""
        assert place.dense is not None
        self.micro_batches = micro_batches
        self._decoders = dict(zip(numbers, decoders, strict=True))
        self._stages, self._place, self._schedule = stages, place, schedule
        self._group = place.dense.get_group("pp")
        self._dtype = dtype
        self._order: Any = None  # torch's schedule; made with the first batch, which says how large messages are
        self._shape: tuple[int, ...] = ()
        for decoder in decoders:
            if isinstance(decoder, FSDPModule):
                # Gathered once a batch and not once a micro-batch. zbv needs it, too: it looks for the parameters of
                # its second half where the forward pass has left them.
                decoder.set_reshard_after_forward(False)
            if schedule == "zbv" and decoder.last:
                decoder.head.loss = repeatable(decoder.head.loss)

    def backward(
        self,
        tokens: Tensor,
        positions: Tensor,
        documents: Tensor | None,
        targets: Tensor,
        padding: Tensor | None = None,
    ) -> Tensor:
        """Adds up the gradients of the summed loss of this process's share [share, seq] of the batch. Returns the sum
        where the last stage is, and zero elsewhere."""
        shape = self._message(tokens, tokens.shape[0] // self.micro_batches)
        if self._order is None:
            self._order, self._shape = self._scheduled(tokens, shape), shape
        if shape != self._shape or tokens.shape[0] % self.micro_batches:
            raise ValueError(
                f"a pipeline made for {self.micro_batches} micro-batches of {self._shape[0]} windows was given "
                f"{tuple(tokens.shape)} tokens: all its batches must have one size"
            )
        losses: list[Tensor] = []
        inputs = (tokens,) if 0 in self._decoders else ()
        context = _context(positions, documents, targets, padding)
        self._order.step(*inputs, target=targets, losses=losses, return_outputs=False, **context)
        if self._stages - 1 not in self._decoders:
            return torch.zeros((), device=tokens.device)
        return torch.stack([loss.detach() for loss in losses]).sum()

    @torch.no_grad()
    def loss(
        self,
        tokens: Tensor,
        positions: Tensor,
        documents: Tensor | None,
        targets: Tensor,
        padding: Tensor | None = None,
    ) -> Tensor:
        """The same sum without gradients, of any number of windows.

        In step: in round t stage s has micro-batch t - s, and all messages of a round travel together. So every pair
        of processes agrees on their order, which NCCL asks for, and a process with two stages keeps both at work.
        """
        rows = self._shape[0] if self._shape else max(1, tokens.shape[0] // self.micro_batches)
        context = _context(positions, documents, targets, padding)
        parts = [{k: v[i : i + rows] for k, v in context.items()} for i in range(0, tokens.shape[0], rows)]
        total = torch.zeros((), device=tokens.device)
        inputs: dict[int, Tensor] = {}  # by stage: what it reads in this round
        for t in range(len(parts) + self._stages - 1):
            outputs: dict[int, Tensor] = {}
            for stage, decoder in self._decoders.items():
                i = t - stage
                if not 0 <= i < len(parts):
                    continue
                x = tokens[i * rows : (i + 1) * rows] if stage == 0 else inputs.pop(stage)
                y = decoder(x, **parts[i])
                if stage == self._stages - 1:
                    total += y
                else:
                    outputs[stage] = y
            arriving = {s: self._message(tokens, len(parts[t + 1 - s]["targets"])) for s in self._next(t, len(parts))}
            inputs = self._exchange(outputs, arriving, tokens.device)
        return total

    def _next(self, t: int, parts: int) -> list[int]:
        """The stages of this process that read a message after round t."""
        return [s for s in self._decoders if s > 0 and 0 <= t + 1 - s < parts]

    def _exchange(
        self, outputs: dict[int, Tensor], arriving: dict[int, tuple[int, ...]], device: torch.device
    ) -> dict[int, Tensor]:
        """Sends the stages' outputs on and returns what arrives for the next round."""
        inputs = {s: outputs.pop(s - 1) for s in arriving if s - 1 in self._decoders}
        buffers = {
            s: torch.empty(shape, dtype=self._dtype, device=device) for s, shape in arriving.items() if s not in inputs
        }
        messages: list[tuple[int, Callable[..., Any], Tensor, int]]
        messages = [(s, dist.isend, self._checked(y, s).contiguous(), self._holder(s + 1)) for s, y in outputs.items()]
        messages += [(s - 1, dist.irecv, buffer, self._holder(s - 1)) for s, buffer in buffers.items()]
        ops = [dist.P2POp(op, data, peer, self._group) for _, op, data, peer in sorted(messages, key=lambda m: m[0])]
        for work in dist.batch_isend_irecv(ops) if ops else ():
            work.wait()
        return {**inputs, **buffers}

    def _checked(self, y: Tensor, stage: int) -> Tensor:
        if y.dtype != self._dtype:
            raise RuntimeError(f"stage {stage} computes in {y.dtype}, where its neighbours expect {self._dtype}")
        return y

    def _holder(self, stage: int) -> int:
        """The rank of the process that holds a stage."""
        pp = self._place.sizes.pp
        at = next(r for r in range(pp) if stage in stages_of(r, pp, self._schedule))
        return dist.get_global_rank(self._group, at)

    def _message(self, tokens: Tensor, rows: int) -> tuple[int, ...]:
        """The shape of hidden states between stages: tensor parallelism has them cut along the sequence."""
        dim = next(iter(self._decoders.values())).shape.dim
        return rows, tokens.shape[1] // self._place.sizes.tp, dim

    def _scheduled(self, tokens: Tensor, shape: tuple[int, ...]) -> Any:
        hidden = torch.empty(shape, dtype=self._dtype, device="meta", requires_grad=True)
        loss = torch.empty((), device="meta", requires_grad=True)
        rows = torch.empty((shape[0], tokens.shape[1]), dtype=tokens.dtype, device="meta")
        stages = [
            _Stage(
                hidden,
                submodule=decoder,
                stage_index=number,
                num_stages=self._stages,
                device=tokens.device,
                input_args=rows if number == 0 else hidden,
                output_args=loss if number == self._stages - 1 else hidden,
                group=self._group,
                dw_builder=None if divisible(decoder) else nothing_later,
            )
            for number, decoder in self._decoders.items()
        ]
        make = SCHEDULES[self._schedule]
        one = self._schedule in ("gpipe", "1f1b")
        return make(stages[0] if one else stages, self.micro_batches, loss_fn=_own_loss, scale_grads=False)


class _Stage(PipelineStage):
    """A stage whose messages are received into fresh memory and forgotten with their micro-batch."""

    def __init__(self, message: Tensor, **settings: Any) -> None:
        super().__init__(**settings)
        self._like = message
        self._gone = torch.empty(0, device=self.device)
        # torch sees to FSDP where it is the whole stage that is sharded, not where only its experts are.
        self._parts = [] if isinstance(self.submod, FSDPModule) else sharded_parts(self.submod)
        self._backwards = 0

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        made = super()._prepare_forward_infra(*args, **kwargs)
        for infos in self.args_recv_info.values():
            self._forget(infos)
        return made

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        made = super()._prepare_backward_infra(*args, **kwargs)
        for infos in self.grad_recv_info.values():
            self._forget(infos)
        return made

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self._renew(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        self._renew(self.grad_recv_info[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        received = self.args_recv_info[fwd_chunk_id]
        for info in filter(_has_buffer, received):
            info.buffer.requires_grad_()  # type: ignore[union-attr]  # it has one
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if not self.is_last and (output.dtype, output.shape) != (self._like.dtype, self._like.shape):
            raise RuntimeError(
                f"pipeline stage {self.stage_index} gives {output.dtype} {tuple(output.shape)}, "
                f"but its neighbour expects {self._like.dtype} {tuple(self._like.shape)}"
            )
        self._forget(received)  # the graph has it
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        self._backwards += 1
        for part in self._parts:
            part.set_requires_gradient_sync(self._backwards % (self.chunks or 1) == 0, recurse=False)
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        self._forget(self.grad_recv_info[bwd_chunk_id])

    def _renew(self, infos: Sequence[Any]) -> None:
        for info in filter(_has_buffer, infos):
            info.buffer = torch.empty_like(self._like, device=self.device, requires_grad=False)

    def _forget(self, infos: Sequence[Any]) -> None:
        for info in filter(_has_buffer, infos):
            info.buffer = self._gone


def _has_buffer(info: Any) -> bool:
    """Whether this input of a stage is a message: the first stage's are arguments."""
    return getattr(info, "buffer", None) is not None


def _own_loss(loss: Tensor, _targets: Tensor) -> Tensor:
    """The last stage's output is the loss."""
    return loss


def _context(positions: Tensor, documents: Tensor | None, targets: Tensor, padding: Tensor | None) -> dict[str, Tensor]:
    """What every stage is given of a batch beside its input."""
    context = {"positions": positions, "targets": targets, "documents": documents, "padding": padding}
    return {name: value for name, value in context.items() if value is not None}

"""DeepSpeed's engine, driven as Shoal's step wants it: a gradient that is a sum, one norm, one factor, one update.

DeepSpeed keeps the pieces of all matrices, their master weights and the optimizer's state; it sends, reduces and
offloads. What a step is stays with Shoal: DeepSpeed divides by nothing that is not multiplied back, clips nothing, has
no learning rate of its own, and its checkpoints are never written.

Beside DeepSpeed's public functions five things are asked of its optimizers, as it has no public way to them: the local
pieces of the gradient and of the weights, that weights which were set are seen by the next forward pass, and what is
kept in the memory of the CPU. They are in `Pieces` alone. Read in 0.19.8.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.errors import SetupError, SpecError
from shoal.parallel.place import Place
from shoal.parallel.zero.flat_adamw import FlatAdamW
from shoal.parallel.zero.host import lock
from shoal.spec.engine import Engine

_BUCKET = 500_000_000  # numbers that DeepSpeed sends at once, at most; its own default


def package(device: torch.device) -> Any:
    """The package, and no operator of it: what DeepSpeed would compile while it starts can hang behind the lock of a
    build that somebody killed."""
    os.environ["DS_ACCELERATOR"] = device.type
    try:
        import deepspeed
    except ImportError:
        raise SetupError(
            "engine.name deepspeed needs the package deepspeed, which is not installed: `pip install "
            "'shoal[deepspeed]'`, or set engine.name to native."
        ) from None
    deepspeed.ops.__compatible_ops__ = {}
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    return deepspeed


class Zero:
    """ZeRO over all processes of a place. Begun once the optimizer is known."""

    def __init__(self, asked: Engine, place: Place, dim: int, params: int, micro_batch: int) -> None:
        self._deepspeed = package(place.device)
        self.stage, self._offload, self._place = asked.zero, asked.offload == "cpu", place
        _join(place)
        self._deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)
        self.config = _config(asked, dim, params, micro_batch)
        self._engine: Any = None
        self._summed = False

    def partition(self, module: nn.Module) -> None:
        """With stage 3 each process keeps its part of a module's weights from here on. Collective."""
        if self.stage == 3:
            self._deepspeed.zero.Init(module=module, config_dict_or_path=self.config, dtype=torch.float32)

    def share(self, module: nn.Module, weight: Tensor) -> None:
        """That a module reads a weight of another one (a tied head)."""
        if self.stage == 3:
            self._deepspeed.zero.register_external_parameter(module, weight)

    def begin(self, module: nn.Module, optimizer: FlatAdamW) -> None:
        """Collective. The optimizer's groups are DeepSpeed's from here on."""
        os.environ["LOCAL_RANK"] = str(self._place.device.index or 0)  # of the GPU that this process has
        self._engine, *_ = self._deepspeed.initialize(model=module, optimizer=optimizer, config=self.config)
        self.pieces = Pieces(self._engine.optimizer, self.stage, self._offload, self._place.device)
        self.pieces.settle()
        optimizer.lay_out(self.pieces.masters())
        self.pieces.link()

    # A step

    def forward(self, *inputs: Any) -> Tensor:
        loss: Tensor = self._engine(*inputs)
        return loss

    def open(self) -> None:
        """A gradient begins. ZeRO sums it up in buckets that are closed with the last micro-batch."""
        if self._summed:
            raise SpecError(
                "engine.name deepspeed sums the gradient of a step once: call backward once in a step, with all its "
                "batches, or set engine.name to native."
            )
        self._summed = True

    def accumulate(self, last: bool) -> None:
        """Said before each forward pass."""
        self._engine.set_gradient_accumulation_boundary(last)

    def backward(self, loss: Tensor) -> None:
        """DeepSpeed averages over processes, and a gradient here is a sum."""
        self._engine.backward(loss * self._place.world)

    def step(self) -> None:
        """The optimizer's, on the pieces; or none, and the gradient is gone, if it was told so. Collective."""
        self._summed = False
        if self._engine.optimizer is not None:
            self._engine.step()

    # Whole tensors, one at a time; all collective

    def weight(self, parameter: nn.Parameter) -> Tensor:
        return _there(self._deepspeed.utils.safe_get_full_fp32_param(parameter))

    def moment(self, parameter: nn.Parameter, key: str) -> Tensor:
        return _there(self._deepspeed.utils.safe_get_full_optimizer_state(parameter, key))

    def gradient(self, parameter: nn.Parameter) -> Tensor:
        return _there(self._deepspeed.utils.safe_get_full_grad(parameter))

    def set_weight(self, parameter: nn.Parameter, whole: Tensor) -> None:
        self._deepspeed.utils.safe_set_full_fp32_param(parameter, whole)

    def set_moment(self, parameter: nn.Parameter, key: str, whole: Tensor) -> None:
        self._deepspeed.utils.safe_set_full_optimizer_state(parameter, whole, key)


class Pieces:
    """What this process has of the flat tensors that ZeRO makes of all parameters."""

    def __init__(self, optimizer: Any, stage: int, offload: bool, device: torch.device) -> None:
        self._optimizer, self._stage, self._offload, self._device = optimizer, stage, offload, device

    def settle(self) -> None:
        """What stages 1 and 2 keep in the memory of the CPU: nothing twice, and within reach of the GPU."""
        if not self._offload or self._stage == 3:
            return
        # A copy of the master weights in the type of the weights, through which they go to the GPU: it is the same.
        self._optimizer.param_buffer_of_bit16_for_cpu_offload_groups = [m.detach() for m in self.masters()]
        if self._device.type == "cuda":
            lock([t for m in self.masters() for t in (m, m.grad) if t is not None])

    def masters(self) -> list[Tensor]:
        """The master weights, which the optimizer updates."""
        by_stage = "fp32_partitioned_groups_flat" if self._stage == 3 else "single_partition_of_fp32_groups"
        found: list[Tensor] = getattr(self._optimizer, by_stage)
        return found

    def link(self) -> None:
        """Once the optimizer has its state: to whom it belongs."""
        if self._stage < 3:
            self._optimizer._lazy_init_hp_params_optimizer_state()

    def gradients(self) -> list[Tensor]:
        """Of the whole batch, after its last micro-batch."""
        if self._stage == 3:
            of = self._optimizer.get_fp32_grad_partitions()
            return [grad for group in of.values() for grad in group.values()]
        if self._offload:
            if self._device.type == "cuda":  # the last of them may be on their way
                torch.cuda.current_stream(self._device).synchronize()
            return [master.grad for master in self.masters() if master.grad is not None]
        return [grad for group in self._optimizer.averaged_gradients.values() for grad in group or ()]

    def refresh(self) -> None:
        """The weights that are computed with, from the master weights. Collective."""
        optimizer = self._optimizer
        if self._stage < 3:
            optimizer.update_lp_params()
            return
        for group in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(group)
        if small := optimizer.persistent_parameters:  # stay whole on every process, unless they are told not to
            small[0].partition(small)
            small[0].all_gather(small)


def _config(asked: Engine, dim: int, params: int, micro_batch: int) -> dict[str, Any]:
    bucket = min(_BUCKET, max(params, 1))
    zero: dict[str, Any] = {
        "stage": asked.zero,
        "contiguous_gradients": True,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
    }
    if asked.zero == 3:
        zero["stage3_param_persistence_threshold"] = 10 * dim  # norms stay whole, matrices do not
    if asked.offload == "cpu":
        # What stage 3 keeps is in pieces; the other stages have one for all matrices, which `lock` reaches as it is.
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": asked.zero == 3}
        zero |= {"offload_param": {"device": "cpu"}} if asked.zero == 3 else {}
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": 1,  # said with each micro-batch
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,
        "steps_per_print": None,
    }


def _join(place: Place) -> None:
    """DeepSpeed wants a group also of one process."""
    os.environ.setdefault("LOCAL_RANK", "0")
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if place.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def _there(found: Tensor | None) -> Tensor:
    assert found is not None, "frozen parameters are refused"
    return found


def frozen(module: nn.Module) -> Iterator[str]:
    return (name for name, parameter in module.named_parameters() if not parameter.requires_grad)

"""What the stand-in for Horovod does not do, and what to do in its place. It is an ImportError, after which `shoal run`
does not try again: a second attempt would end the same way."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import NoReturn

_ONLY_TORCH = "Shoal's stand-in has horovod.torch alone; install Horovod itself, or move the training to PyTorch"
_NO_SETS = "all processes work together in it; make a group with torch.distributed.new_group"
REFUSED = {
    "horovod.tensorflow": _ONLY_TORCH,
    "horovod.keras": _ONLY_TORCH,
    "horovod.mxnet": _ONLY_TORCH,
    "horovod.spark": _ONLY_TORCH,
    "horovod.ray": _ONLY_TORCH,
    "horovod.run": "`shoal run --processes N` starts the processes; call the training function itself",
    "horovod.runner": "`shoal run --processes N` starts the processes; call the training function itself",
    "horovod.torch.elastic": "`shoal run` starts a script again after a failure; save, and go on from what was saved",
    "horovod.torch.Adasum": "only Average, Sum, Min, Max and Product are there; use op=hvd.Average, and its rate",
    "horovod.torch.ProcessSet": _NO_SETS,
    "horovod.torch.add_process_set": _NO_SETS,
    "horovod.torch.remove_process_set": _NO_SETS,
    "horovod.torch.global_process_set": "all processes work together in it; leave process_set out",
    "horovod.torch.start_timeline": "`shoal run` keeps a journal of the steps; use torch.profiler for the rest",
    "horovod.torch.stop_timeline": "`shoal run` keeps a journal of the steps; use torch.profiler for the rest",
    **{
        f"horovod.torch.{name}{suffix}": f"call torch.distributed.{instead} after hvd.init()"
        for name, instead in (
            ("alltoall", "all_to_all_single"),
            ("reducescatter", "reduce_scatter_tensor"),
            ("grouped_reducescatter", "reduce_scatter_tensor"),
            ("grouped_allgather", "all_gather"),
        )
        for suffix in ("", "_async")
    },
    "horovod.torch.sparse_allreduce_async": "give DistributedOptimizer sparse_as_dense=True",
}


def refuse(name: str) -> NoReturn:
    raise ImportError(f"{name} is not in Shoal's stand-in for Horovod: {REFUSED[name]}.")


def missing(module: str, name: str) -> NoReturn:
    """For the `__getattr__` of a module."""
    if f"{module}.{name}" in REFUSED:
        refuse(f"{module}.{name}")
    raise AttributeError(f"Shoal's stand-in for Horovod has no {module}.{name}; docs/guide/scripts.md says what it has")


class Finder(MetaPathFinder):
    """Refuses modules by name: `import horovod.tensorflow` finds no file, and Python alone would not say why."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in REFUSED:
            refuse(fullname)
        if fullname.startswith("horovod."):
            raise ImportError(f"Shoal's stand-in for Horovod has no module {fullname}; import horovod.torch.")
        return None

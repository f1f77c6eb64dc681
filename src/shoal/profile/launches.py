"""Shapes for hand-written Triton kernels, which a trace shows without any: it does not know what they were given."""

from __future__ import annotations

from typing import Any

import torch

PREFIX = "triton::"  # of the operator that is then around such a kernel


def name_triton_launches() -> None:
    """Each launch becomes an operator with inputs, in this process, which does nothing but be profiled. What the
    compiler generates has its own."""
    record: Any = getattr(torch._C._profiler, "_RecordFunctionFast", None)
    try:
        from triton.runtime.jit import JITFunction

        with record(PREFIX, [torch.zeros(1)]):  # private: another torch may not have it, or otherwise
            launch = JITFunction.run
    except (ImportError, AttributeError, TypeError):
        return

    def named(self: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        with record(f"{PREFIX}{getattr(self, '__name__', 'kernel')}", tensors):
            return launch(self, *args, **kwargs)

    JITFunction.run = named

"""How a model is laid out before its first step."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor
from functorch.compile import make_boxed_func
from torch._inductor import compile_fx

from shoal.model import documents
from shoal.parallel.build import build
from shoal.parallel.place import Place
from shoal.same_bits import same_bits
from tests.ranks import run_ranks
from tests.train.tiny import make_run

RUN = {"model.vocab_size": 64, "mesh.recompute": "none", "mesh.micro_batch": 1, "train.precision": "fp32"}


def test_the_compiler_chooses_no_kernel_by_its_time_backwards_neither() -> None:
    """Another process, or this one after a restart, could find another one faster, and sum in another order."""

    def rank(rank: int, world: int) -> list[bool]:
        timed: list[bool] = []  # whether each graph that is compiled may be; none is really made

        def inner(graph: Any, *_: Any, **__: Any) -> Any:
            timed.append(not inductor.deterministic)
            return make_boxed_func(graph.forward)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compile_fx, "compile_fx", partial(compile_fx.compile_fx, inner_compile=inner))
            run = make_run(Path("data"), **RUN, **{"train.compile": True, "model.layers": 1})
            model = build(run, Place(0, 1, torch.device("cpu")))
            model.decoders[0](torch.zeros(1, 8, dtype=torch.long)).sum().backward()
        return timed

    assert run_ranks(rank, 1) == [[False, False]]


def test_attention_that_is_compiled_by_itself_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {}
    monkeypatch.setattr(torch, "compile", lambda function, **options: told.update(options) or function)
    documents._compiled.__wrapped__()
    assert told == {"options": same_bits()}
    assert same_bits() == {"deterministic": True}

"""Tokens that a device picks, asked for a step ahead: those of the host, and nothing of who has ended is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal.errors import UsageError
from shoal.generate.engine import Engine
from shoal.generate.graphs import Graphed
from shoal.generate.request import CANCELLED, CONTEXT, LENGTH, STOP, Sampling, Token
from shoal.model.decoder import Decoder
from shoal.spec.model import Model
from shoal.spec.shape import shape_of

VOCAB = 151
KINDS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "windows": {"family": "qwen3", "sliding_window": 9},
    "experts": {"family": "mixtral", "experts": {"count": 4, "top_k": 2, "ffn_dim": 32}},
}


def model_of(kind: str) -> Decoder:
    about = {"vocab_size": 160, "dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 48, "max_seq_len": 64}
    model = Decoder(shape_of(Model.model_validate({**about, "init_std": 0.3, **KINDS[kind]})))
    model.init_weights(3)
    return model


def prompts(count: int) -> list[list[int]]:
    drawn = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCAB, (3 + 5 * i,), generator=drawn).tolist() for i in range(count)]


def engine(model: Decoder, places: int, **more: Any) -> Engine:
    runner = Graphed(model, places, 64, vocabulary=VOCAB)
    return Engine(model, vocab_size=VOCAB, batch=places, chunk=7, runner=runner, **more)


def told(engine: Engine, asked: list[tuple[list[int], Sampling]]) -> list[tuple[list[int | None], str | None]]:
    numbers = [engine.submit(tokens, sampling) for tokens, sampling in asked]
    events: dict[int, list[Token]] = {number: [] for number in numbers}
    for event in engine.run():
        events[event.request].append(event)
    assert all(one.finish is None for each in events.values() for one in each[:-1])
    return [([one.token for one in events[n]], events[n][-1].finish) for n in numbers]


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_that_are_asked_for_ahead_are_those_of_rows(kind: str) -> None:
    model = model_of(kind)
    ways = [{"temperature": 0.0}, {"seed": 3, "top_p": 0.9}, {"seed": 4, "top_k": 5}, {"seed": 5, "min_p": 0.1}]
    asked = [
        (tokens, Sampling(max_tokens=1 + 6 * i, **ways[i % len(ways)]))  # type: ignore[arg-type]  # each of its own type
        for i, tokens in enumerate(prompts(6))
    ]
    # Some that only the host can pick for: the others go on beside them.
    asked += [([7, 8, 9], Sampling(max_tokens=4, temperature=0.0, repetition_penalty=1.5))]
    wanted = told(Engine(model, vocab_size=VOCAB, batch=3, chunk=7), asked)
    ahead = engine(model, 3)
    assert told(ahead, asked) == wanted
    assert ahead._runner.blocks.held == 0  # type: ignore[attr-defined]
    assert not ahead.busy


def test_a_token_beyond_the_end_is_dropped() -> None:
    model = model_of("grouped")
    [(free, _)] = told(engine(model, 2), [([1, 2, 3], Sampling(max_tokens=10, temperature=0))])
    stop = frozenset({int(free[4] or 0)})
    first = free.index(free[4])
    asked = [
        ([1, 2, 3], Sampling(max_tokens=30, temperature=0, stop_ids=stop)),
        ([1, 2, 3], Sampling(max_tokens=5, temperature=0)),
        ([1, 2, 3], Sampling(max_tokens=1, temperature=0)),
        ([1, 2, 3], Sampling(max_tokens=1000, temperature=0)),
    ]
    found = told(engine(model, 2), asked)
    assert found[0] == ([*free[:first], None], STOP)
    assert found[1] == (free[:5], LENGTH)
    assert found[2] == (free[:1], LENGTH)
    assert (len(found[3][0]), found[3][1]) == (61, CONTEXT)


def test_who_is_cancelled_while_a_token_is_on_its_way_is_told_of_no_more() -> None:
    model = model_of("grouped")
    asking = engine(model, 1)
    wanted = told(engine(model, 1), [([1, 2, 4], Sampling(max_tokens=8, temperature=0))])
    first, second = (asking.submit([1, 2, i], Sampling(max_tokens=20 - 3 * i, temperature=0)) for i in (3, 4))
    assert [event.request for event in asking.step()] == [first]
    assert asking.step() == []  # asked for, and not read yet
    asking.cancel(first)
    events = list(asking.run())
    assert [(e.request, e.finish) for e in events if e.finish] == [(first, CANCELLED), (second, LENGTH)]
    assert [e.token for e in events if e.request == second] == wanted[0][0]
    assert asking._runner.blocks.held == 0  # type: ignore[attr-defined]


def test_what_was_picked_is_found_again_by_who_goes_on_from_it() -> None:
    model = model_of("grouped")
    asking = engine(model, 2, version="a")
    [(answer, _)] = told(asking, [([1, 2, 3], Sampling(max_tokens=31, temperature=0))])
    longer = [1, 2, 3, *(int(token or 0) for token in answer), 5]
    fresh = told(engine(model, 2), [(longer, Sampling(max_tokens=5, temperature=0))])
    number = asking.submit(longer, Sampling(max_tokens=5, temperature=0))
    asking._admit()
    assert asking._reading[0].seat.cached == 32
    assert [e.token for e in asking.run() if e.request == number] == fresh[0][0]


def test_damaged_weights_end_an_answer_with_an_error() -> None:
    model = model_of("grouped")
    asking = engine(model, 2)
    asking.submit([1, 2, 3], Sampling(max_tokens=20, temperature=0))
    asking.step()
    with torch.no_grad():
        model.norm.weight[0] = float("nan")
    last = list(asking.run())[-1]
    assert "its logits are not finite" in last.error


def test_between_passes_the_model_is_its_own() -> None:
    model = model_of("windows")
    tokens = torch.tensor([[1, 2, 3, 4] * 4])
    before, scored = model(tokens), Engine(model, vocab_size=VOCAB).score([([1, 2], [3, 4])])
    asking = engine(model, 2)
    asking.submit([1, 2, 3], Sampling(max_tokens=5))
    asking.step()
    assert torch.equal(model(tokens), before)
    assert asking.score([([1, 2], [3, 4])]) == scored


def test_eight_bits_are_refused_where_they_help_nobody() -> None:
    with pytest.raises(UsageError, match="weights of 8 bits are for a GPU"):
        Engine(model_of("grouped"), vocab_size=VOCAB, eight_bits=True)

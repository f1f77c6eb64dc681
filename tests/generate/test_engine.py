"""The engine computes what the trainer and transformers compute, whoever is served beside whom."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.errors import UsageError
from shoal.generate.engine import Engine
from shoal.generate.request import CANCELLED, CONTEXT, ERROR, LENGTH, STOP, Sampling
from shoal.model.decoder import Decoder
from shoal.spec.model import Model
from shoal.spec.shape import shape_of
from tests.model.families import CONFIGS, random_model
from tests.model.test_transformers import imported

VOCAB = 151
# One of each kind of block: grouped keys, experts, windows, latent attention, a state space beside attention, and what
# has no cache. The others for `make test-slow`.
QUICK = (
    "llama3-tied",
    "qwen3-sliding",
    "mixtral",
    "gemma3",
    "deepseek-v3",
    "bamba-groups-biases-tied",
    "llama-dynamic",
)


def prompts(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    drawn = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, longest, (count,), generator=drawn).tolist()
    return [torch.randint(3, VOCAB, (n,), generator=drawn).tolist() for n in lengths]


def answers(engine: Engine, asked: list[tuple[list[int], Sampling]]) -> list[tuple[list[int], list[float]]]:
    numbers = [engine.submit(tokens, sampling) for tokens, sampling in asked]
    found: dict[int, tuple[list[int], list[float]]] = {number: ([], []) for number in numbers}
    for event in engine.run():
        if event.token is not None:
            found[event.request][0].append(event.token)
            found[event.request][1].append(event.logprob)
    return [found[number] for number in numbers]


@torch.no_grad()
def said_by_the_trainer(model: Decoder, context: list[int], more: list[int]) -> list[float]:
    logits = model(torch.tensor([[*context, *more][:-1]]))[0, len(context) - 1 :]
    spread = torch.nn.functional.log_softmax(logits, -1, dtype=torch.float32)
    found: list[float] = spread.gather(-1, torch.tensor(more)[:, None])[:, 0].tolist()
    return found


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in CONFIGS])
def test_greedy_tokens_are_those_of_transformers_and_log_probabilities_those_of_the_trainer(
    name: str, tmp_path: Path
) -> None:
    theirs = random_model(name)
    theirs.save_pretrained(tmp_path)
    model = imported(tmp_path)
    short = model.shape.max_seq_len < 64
    count, new = (5, 8) if short else (5, 20)
    asked = prompts(count, 8 if short else 30)
    engine = Engine(model, vocab_size=VOCAB, batch=3, chunk=7)
    found = answers(engine, [(tokens, Sampling(max_tokens=new, temperature=0)) for tokens in asked])
    for tokens, (text, logprobs) in zip(asked, found, strict=True):
        row = torch.tensor([tokens])
        wanted = theirs.generate(
            row, attention_mask=torch.ones_like(row), max_new_tokens=new, min_new_tokens=new, do_sample=False,
            eos_token_id=-1, pad_token_id=0,
        )  # fmt: skip
        assert text == wanted[0, len(tokens) :].tolist()
        assert logprobs == pytest.approx(said_by_the_trainer(model, tokens, text), abs=1e-5)


@pytest.mark.parametrize("name", ["qwen3-sliding", "deepseek-v3", "bamba"])
def test_texts_that_are_scored_together_are_scored_as_if_alone(name: str, tmp_path: Path) -> None:
    random_model(name).save_pretrained(tmp_path)
    model = imported(tmp_path)
    a, b, *rest = prompts(6, 20, seed=3)
    items = [(a[:3], one) for one in rest] + [(b, rest[0][:1]), (a, []), (b[:1], rest[1])] + [(a[:2], rest[1])]
    for (context, more), scored in zip(items, Engine(model, vocab_size=VOCAB).score(items), strict=True):
        assert scored.logprobs == pytest.approx(said_by_the_trainer(model, context, more) if more else [], abs=1e-5)
        best = answers(Engine(model, vocab_size=VOCAB), [(context, Sampling(max_tokens=len(more) or 1, temperature=0))])
        assert scored.greedy == (not more or best[0][0] == more)


def test_the_likeliest_continuation_is_said_to_be_greedy(small: Decoder) -> None:
    engine = Engine(small, vocab_size=VOCAB)
    [(text, _)] = answers(engine, [([1, 2, 3], Sampling(max_tokens=6, temperature=0))])
    other = [*text[:-1], (text[-1] + 1) % VOCAB]
    assert [one.greedy for one in engine.score([([1, 2, 3], text), ([1, 2, 3], other)])] == [True, False]


@pytest.fixture(scope="module")
def small() -> Decoder:
    made = Model(vocab_size=160, dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=48, max_seq_len=40, init_std=0.3)
    model = Decoder(shape_of(made))
    model.init_weights(3)
    return model


def test_a_second_turn_computes_only_what_is_new_and_says_the_same(small: Decoder) -> None:
    first, more = prompts(1, 20)[0], [5, 6, 7]
    engine = Engine(small, vocab_size=VOCAB, version="a")
    [(answer, _)] = answers(engine, [(first, Sampling(max_tokens=5, temperature=0))])
    second = [*first, *answer, *more]
    fresh = answers(Engine(small, vocab_size=VOCAB), [(second, Sampling(max_tokens=5, temperature=0))])
    hits = engine._runner.slots.hits  # type: ignore[attr-defined]
    assert answers(engine, [(second, Sampling(max_tokens=5, temperature=0))])[0][0] == fresh[0][0]
    # All but the last token of the answer, which was never fed, and what is new.
    assert engine._runner.slots.hits - hits == len(first) + len(answer) - 1  # type: ignore[attr-defined]


def test_other_weights_find_nothing_of_the_old_ones(small: Decoder) -> None:
    tokens = prompts(1, 20)[0]
    engine = Engine(small, vocab_size=VOCAB, version="a")
    answers(engine, [(tokens, Sampling(max_tokens=2))])
    engine.version = "b"
    answers(engine, [(tokens, Sampling(max_tokens=2))])
    assert engine._runner.slots.hits == 0  # type: ignore[attr-defined]
    answers(engine, [(tokens, Sampling(max_tokens=2))])
    assert engine._runner.slots.hits == len(tokens) - 1  # type: ignore[attr-defined]


def test_an_answer_says_why_it_ended(small: Decoder) -> None:
    engine = Engine(small, vocab_size=VOCAB, batch=2)
    [(free, _)] = answers(engine, [([1, 2, 3], Sampling(max_tokens=10, temperature=0))])

    def ends(**asked: Any) -> tuple[str | None, int]:
        number = engine.submit([1, 2, 3], Sampling(temperature=0, **asked))
        events = [event for event in engine.run() if event.request == number]
        return events[-1].finish, sum(event.token is not None for event in events)

    first = free.index(free[4])
    assert ends(max_tokens=4) == (LENGTH, 4)
    assert ends(max_tokens=30, stop_ids=frozenset({free[4]})) == (STOP, first)
    assert ends(max_tokens=30, stop_ids=frozenset({free[0]})) == (STOP, 0)
    assert ends(max_tokens=9, stop_ids=frozenset({free[0]}), ignore_stop=True) == (LENGTH, 9)
    assert ends(max_tokens=1000) == (CONTEXT, 37)


def test_who_is_cancelled_makes_room_at_once(small: Decoder) -> None:
    engine = Engine(small, vocab_size=VOCAB, batch=1)
    first, second = (engine.submit([1, 2, i], Sampling(max_tokens=20, temperature=0)) for i in (3, 4))
    assert [event.request for event in engine.step()] == [first]
    assert (engine.running, engine.waiting) == (1, 1)
    engine.cancel(first)
    events = list(engine.run())
    assert [(e.request, e.finish) for e in events if e.finish] == [(first, CANCELLED), (second, LENGTH)]
    assert not engine.busy


def test_draws_do_not_depend_on_who_is_served_beside(small: Decoder) -> None:
    asked = [(tokens, Sampling(max_tokens=8, temperature=1.0, seed=7 + i)) for i, tokens in enumerate(prompts(6, 20))]
    together = answers(Engine(small, vocab_size=VOCAB, batch=6), asked)
    alone = [answers(Engine(small, vocab_size=VOCAB, batch=1), [one])[0] for one in asked]
    assert [text for text, _ in together] == [text for text, _ in alone]
    assert len({tuple(text) for text, _ in together}) == 6


def test_rows_beyond_the_tokenizer_are_never_drawn(small: Decoder) -> None:
    hot = [([1], Sampling(max_tokens=30, temperature=50.0, seed=seed)) for seed in range(20)]
    wide, narrow = (max(max(text) for text, _ in answers(Engine(small, vocab_size=size), hot)) for size in (160, 20))
    assert wide >= 100
    assert narrow < 20


def test_log_probabilities_of_the_prompt_and_of_the_likeliest_tokens(small: Decoder) -> None:
    tokens = prompts(1, 30)[0]
    engine = Engine(small, vocab_size=VOCAB, chunk=4)
    engine.submit(tokens, Sampling(max_tokens=2, temperature=0, logprobs=3, prompt_logprobs=True))
    first, last = engine.run()
    assert first.prompt_logprobs == pytest.approx(said_by_the_trainer(small, tokens[:1], tokens[1:]), abs=1e-5)
    assert last.prompt_logprobs == ()
    assert [len(event.top) for event in (first, last)] == [3, 3]
    assert first.top[0] == (first.token, first.logprob)
    assert first.top[0][1] > first.top[1][1] > first.top[2][1]
    assert math.fsum(math.exp(p) for _, p in first.top) < 1


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([], "at least one token"),
        ([1, 160], "token 160, but the model knows 160"),
        ([1] * 41, "41 tokens, but the context is 40"),
    ],
)
def test_a_prompt_that_the_model_cannot_read_is_refused(tokens: list[int], words: str, small: Decoder) -> None:
    with pytest.raises(UsageError, match=words):
        Engine(small, vocab_size=VOCAB).submit(tokens, Sampling())


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1}, {"temperature": math.nan}, {"top_k": 0}, {"top_p": 1.5}, {"max_tokens": 0}]
)
def test_settings_that_mean_nothing_are_refused(wrong: dict[str, Any]) -> None:
    [name] = wrong
    with pytest.raises(UsageError, match=f"{name} is "):
        Sampling(**wrong)


def test_damaged_weights_end_each_answer_with_an_error(small: Decoder) -> None:
    made = Model(vocab_size=40, dim=32, layers=1, heads=2, ffn_dim=48)
    model = Decoder(shape_of(made))
    model.init_weights(3)
    with torch.no_grad():
        model.norm.weight[0] = float("nan")
    engine = Engine(model, vocab_size=40)
    for _ in range(2):
        engine.submit([1, 2], Sampling(max_tokens=5))
    events = list(engine.run())
    assert Counter(event.finish for event in events) == {ERROR: 2}
    assert "after 2 tokens its logits are not finite" in events[0].error


def test_between_passes_the_model_is_as_it_was(small: Decoder) -> None:
    tokens = torch.tensor([[1, 2, 3, 4]])
    before = small(tokens)
    engine = Engine(small, vocab_size=VOCAB)
    engine.submit([1, 2, 3], Sampling(max_tokens=5))
    engine.step()
    assert torch.equal(small(tokens), before)
    assert small(tokens, targets=tokens).requires_grad

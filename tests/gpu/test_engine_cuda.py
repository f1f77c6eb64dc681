"""The engine on a GPU: the tokens of the host, exact to the bit in bf16, layers of a state space, weights of 8 bits."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from shoal.generate.dense import Dense
from shoal.generate.engine import Engine
from shoal.generate.graphs import Graphed
from shoal.generate.request import STOP, Sampling
from shoal.model import exact
from shoal.model.decoder import Decoder
from shoal.spec.model import Model
from shoal.spec.shape import shape_of
from tests.gpu.test_generate_cuda import MODELS, SMALL, small

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")

VOCAB = 512
ROUNDED = ("llama", "qwen3", "latent")  # a router, and norms beside one, are computed with weights in float32


def answers(engine: Engine, asked: list[tuple[list[int], Sampling]]) -> list[tuple[list[int], list[float]]]:
    numbers = [engine.submit(tokens, sampling) for tokens, sampling in asked]
    found: dict[int, tuple[list[int], list[float]]] = {number: ([], []) for number in numbers}
    for event in engine.run():
        if event.token is not None:
            found[event.request][0].append(event.token)
            found[event.request][1].append(event.logprob)
    return [found[number] for number in numbers]


@torch.no_grad()
def said_in_one_row(model: Decoder, pairs: list[tuple[list[int], list[int]]]) -> list[list[float]]:
    row = torch.tensor([[t for text, more in pairs for t in (*text, *more)]], device="cuda")
    lengths = [len(text) + len(more) for text, more in pairs]
    documents = torch.cat([torch.full((1, n), i) for i, n in enumerate(lengths)], 1).cuda()
    positions = torch.cat([torch.arange(n)[None] for n in lengths], 1).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        spread = exact.log_softmax(model(row, positions, documents))[0]
    found = []
    for (text, more), own in zip(pairs, spread.split(lengths), strict=True):
        picked = own[len(text) - 1 : -1].gather(-1, torch.tensor(more, device="cuda")[:, None])
        found.append(picked[:, 0].tolist())
    return found


def prompts(count: int) -> list[list[int]]:
    drawn = random.Random(1)
    return [[drawn.randrange(VOCAB) for _ in range(drawn.randrange(3, 90))] for _ in range(count)]


def test_an_engine_on_a_gpu_says_what_one_on_a_processor_says() -> None:
    model = small("llama", torch.float32)
    asked = [(tokens, Sampling(max_tokens=20 + i, temperature=0.0)) for i, tokens in enumerate(prompts(7))]
    asked += [(tokens, Sampling(max_tokens=9, seed=i, top_p=0.8)) for i, tokens in enumerate(prompts(3))]
    asked += [([5, 6, 7], Sampling(max_tokens=6, temperature=0.0, repetition_penalty=1.3))]  # the host picks
    there = Engine(model, vocab_size=VOCAB, batch=4, chunk=50)
    assert isinstance(there._runner, Graphed)
    found = answers(there, asked)
    there._runner.close()
    wanted = answers(Engine(model.cpu(), vocab_size=VOCAB, batch=4), asked)
    assert [text for text, _ in found] == [text for text, _ in wanted]
    assert (
        max(abs(a - b) for (_, x), (_, y) in zip(found, wanted, strict=True) for a, b in zip(x, y, strict=True)) < 1e-3
    )
    assert there._runner.blocks.held == 0


def test_stops_and_cancels_leave_nothing_behind() -> None:
    model = small("llama", torch.bfloat16)
    engine = Engine(model, vocab_size=VOCAB, batch=4)
    [(free, _)] = answers(engine, [([1, 2, 3], Sampling(max_tokens=12, temperature=0.0))])
    stop = frozenset({free[5]})
    number = engine.submit([1, 2, 3], Sampling(max_tokens=50, temperature=0.0, stop_ids=stop))
    gone = engine.submit([1, 2, 4], Sampling(max_tokens=50))
    events = [*engine.step(), *engine.step()]
    engine.cancel(gone)
    events += list(engine.run())
    mine = [e for e in events if e.request == number]
    assert [e.token for e in mine] == [*free[: free.index(free[5])], None]
    assert mine[-1].finish == STOP
    assert engine._runner.blocks.held == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "experts", "latent"])
def test_exact_in_bf16_for_every_batch_order_and_cache_and_in_the_trainer(kind: str) -> None:
    trained = small(kind, torch.float32)
    model = small(kind, torch.bfloat16)
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), trained.parameters(), strict=True):
            mine.copy_(theirs)
    drawn = random.Random(2)
    start = [drawn.randrange(VOCAB) for _ in range(150)]
    texts = [start[: drawn.choice((0, 40, 130, 150))] + tokens for tokens in prompts(64)]
    asked = [(tokens, Sampling(max_tokens=16, temperature=1.0, seed=i)) for i, tokens in enumerate(texts)]
    wanted: list[tuple[list[int], list[float]]] | None = None
    for batch, cache, chunk in ((1, True, 512), (5, False, 33), (64, True, 512), (64, False, 100)):
        if kind != "llama" and batch == 1:
            continue
        order = list(range(len(asked)))
        drawn.shuffle(order)
        engine = Engine(model, vocab_size=VOCAB, batch=batch, chunk=chunk, exact=True, prefix_cache=cache)
        assert isinstance(engine._runner, Graphed)
        shuffled = answers(engine, [asked[i] for i in order])
        found = [shuffled[order.index(i)] for i in range(len(asked))]
        engine._runner.close()
        assert wanted is None or found == wanted
        wanted = found
    assert wanted is not None
    # The trainer, with texts that are packed into one row: with these weights, and with weights in float32 where all it
    # computes with them is in bf16.
    exact.apply(trained)
    for trainer in (model, trained) if kind in ROUNDED else (model,):
        for some in range(0, 64, 8):
            said = said_in_one_row(trainer, [(texts[i], wanted[i][0]) for i in range(some, some + 8)])
            assert said == [wanted[i][1] for i in range(some, some + 8)]
    scored = Engine(model, vocab_size=VOCAB, exact=True).score(
        [(t, m) for t, (m, _) in zip(texts, wanted, strict=True)][:9]
    )
    assert [list(one.logprobs) for one in scored] == [logprobs for _, logprobs in wanted[:9]]


def test_gradients_of_exact_are_the_ordinary_ones() -> None:
    model = small("llama", torch.float32).requires_grad_(True)
    same = small("llama", torch.float32).requires_grad_(True)
    exact.apply(same)
    tokens = torch.randint(0, VOCAB, (2, 200), device="cuda")
    for one in (model, same):
        one(tokens, targets=tokens.roll(-1, 1)).backward()
    for mine, theirs in zip(same.parameters(), model.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert (mine.grad - theirs.grad).norm() < 2e-3 * theirs.grad.norm()


def test_the_plain_engine_does_not_have_the_same_bits() -> None:
    """Or the test above could not fail."""
    model = small("llama", torch.bfloat16)
    asked = [(tokens, Sampling(max_tokens=16, temperature=1.0, seed=i)) for i, tokens in enumerate(prompts(20))]
    one, many = (answers(Engine(model, vocab_size=VOCAB, batch=batch), asked) for batch in (1, 20))
    assert one != many


def test_layers_of_a_state_space_are_asked_on_a_gpu() -> None:
    about: dict[str, Any] = {
        **SMALL,
        "family": "bamba",
        "mamba": {"attention_layers": [1, 3], "heads": 8, "head_dim": 64, "state_dim": 16},
    }
    model = Decoder(shape_of(Model.model_validate(about)))
    model.init_weights(0)
    model = model.to("cuda").requires_grad_(False).eval()
    engine = Engine(model, vocab_size=VOCAB, batch=3)
    assert isinstance(engine._runner, Dense)
    asked = [(tokens, Sampling(max_tokens=10, temperature=0.0)) for tokens in prompts(5)]
    for (tokens, _), (more, logprobs) in zip(asked, answers(engine, asked), strict=True):
        logits = model(torch.tensor([[*tokens, *more]], device="cuda"))[0, len(tokens) - 1 : -1]
        spread = logits.log_softmax(-1)
        assert logits.argmax(-1).tolist() == more
        said = spread.gather(-1, torch.tensor(more, device="cuda")[:, None])[:, 0].tolist()
        assert said == pytest.approx(logprobs, abs=1e-3)


@pytest.mark.parametrize("kind", ["llama", "qwen2, tied"])
def test_weights_of_eight_bits_say_nearly_the_same(kind: str) -> None:
    assert kind in MODELS
    asked = [(tokens, Sampling(max_tokens=8, temperature=0.0)) for tokens in prompts(20)]
    model = small(kind, torch.bfloat16)
    before = [model(torch.tensor([tokens], device="cuda"))[0, -1].float().log_softmax(-1) for tokens, _ in asked]
    engine = Engine(model, vocab_size=VOCAB, batch=3, eight_bits=True)
    few = answers(engine, asked)
    off = []
    for (tokens, _), (text, logprobs), was in zip(asked, few, before, strict=True):
        whole = model(torch.tensor([[*tokens, *text]], device="cuda"))[0, len(tokens) - 1 : -1].float().log_softmax(-1)
        said = whole.gather(-1, torch.tensor(text, device="cuda")[:, None])[:, 0]
        assert (said - torch.tensor(logprobs, device="cuda")).abs().max() < 0.1  # the model has the rounded weights
        off.append(float((whole[0] - was).abs().mean()))
    assert 0 < max(off) < 0.3

"""Exact: an engine's log-probabilities are bitwise the trainer's, whatever is computed beside them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.errors import SetupError, SpecError
from shoal.generate.engine import Engine
from shoal.generate.request import Sampling
from shoal.model import exact
from shoal.model.decoder import Decoder
from shoal.parallel.build import build
from shoal.parallel.place import lay_out
from shoal.spec.mesh import Sizes
from tests.generate.test_engine import answers, said_by_the_trainer
from tests.model.families import random_model
from tests.model.test_transformers import imported
from tests.plan.runs import closed
from tests.ranks import run_ranks

VOCAB = 151


def made(name: str, folder: Path) -> Decoder:
    random_model(name).save_pretrained(folder)
    return imported(folder)


def coming_and_going(
    engine: Engine, asked: list[tuple[list[int], Sampling]], draw: random.Random
) -> list[tuple[list[int], list[float]]]:
    """As `answers`, of requests that come while others are under way; between them come some that leave early."""
    numbers: dict[int, int] = {}
    guests: list[int] = []
    found: list[tuple[list[int], list[float]]] = [([], []) for _ in asked]
    waiting = list(range(len(asked)))
    while waiting or engine.busy:
        for _ in range(draw.randrange(3)):
            if waiting:
                i = waiting.pop(0)
                numbers[engine.submit(*asked[i])] = i
        if waiting and draw.random() < 0.3:
            guests.append(engine.submit(asked[waiting[0]][0], Sampling(max_tokens=20, seed=99)))
        if guests and draw.random() < 0.3:
            engine.cancel(guests.pop(0))
        for event in engine.step():
            if event.request in numbers and event.token is not None:
                text, logprobs = found[numbers[event.request]]
                text.append(event.token)
                logprobs.append(event.logprob)
    return found


@pytest.mark.parametrize(
    ("name", "batches", "count", "new"),
    [
        ("llama3-tied", (1, 5), 6, 10),
        ("qwen3-moe", (1, 5), 6, 10),
        pytest.param("qwen3-sliding", (1, 7, 64), 64, 10, marks=pytest.mark.slow),
        pytest.param("gemma3", (2, 31), 40, 10, marks=pytest.mark.slow),
        *(pytest.param(name, (3, 16), 24, 10, marks=pytest.mark.slow) for name in ("mixtral", "deepseek-v3")),
    ],
)
def test_the_same_bits_for_every_batch_order_and_cache_and_in_the_trainer(
    name: str, batches: tuple[int, ...], count: int, new: int, tmp_path: Path
) -> None:
    model, draw = made(name, tmp_path), random.Random(1)
    start = [draw.randrange(VOCAB) for _ in range(40)]  # which many begin with, past a tile of keys for some
    cuts = [0, 5, 31, 40]
    prompts = [
        start[: draw.choice(cuts)] + [draw.randrange(VOCAB) for _ in range(draw.randrange(1, 8))] for _ in range(count)
    ]
    asked = [(tokens, Sampling(max_tokens=new, temperature=1.0, seed=i)) for i, tokens in enumerate(prompts)]
    wanted: list[tuple[list[int], list[float]]] | None = None
    hits = 0
    for batch in batches:
        for cache in (True, False):
            order = list(range(count))
            draw.shuffle(order)
            engine = Engine(
                model, vocab_size=VOCAB, batch=batch, chunk=draw.choice((1, 3, 7, 33, 512)), exact=True, version="a",
                prefix_cache=cache,
            )  # fmt: skip
            shuffled = coming_and_going(engine, [asked[i] for i in order], draw)
            found = [shuffled[order.index(i)] for i in range(count)]
            hits += engine._runner.slots.hits  # type: ignore[attr-defined]
            assert wanted is None or found == wanted
            wanted = found
    assert hits > 20
    assert wanted is not None
    for tokens, (text, logprobs) in zip(prompts, wanted, strict=True):
        assert logprobs == said_by_the_trainer(model, tokens, text)
    scored = Engine(model, vocab_size=VOCAB, exact=True).score(
        [(p, t) for p, (t, _) in zip(prompts, wanted, strict=True)]
    )
    assert [list(one.logprobs) for one in scored] == [logprobs for _, logprobs in wanted]


def test_weights_that_an_engine_laid_out_are_exact_again(tmp_path: Path) -> None:
    asked = [([1, 2, 3, 4], Sampling(max_tokens=10, temperature=0))]
    fresh, used = made("llama3-tied", tmp_path), imported(tmp_path)
    answers(Engine(used, vocab_size=VOCAB, alone=True), asked)
    assert not all(parameter.is_contiguous() for parameter in used.parameters())  # or there was nothing to put back
    found = [answers(Engine(model, vocab_size=VOCAB, exact=True), asked) for model in (fresh, used)]
    assert found[0] == found[1]


def test_the_plain_engine_does_not_have_the_same_bits(tmp_path: Path) -> None:
    """Or the tests above could not fail."""
    model = made("llama3-tied", tmp_path)
    prompts = [[i + 1, *range(5, 40)] for i in range(8)]
    asked = [(tokens, Sampling(max_tokens=10, temperature=0)) for tokens in prompts]
    found = answers(Engine(model, vocab_size=VOCAB, batch=8), asked)
    assert any(
        logprobs != said_by_the_trainer(model, tokens, text)
        for tokens, (text, logprobs) in zip(prompts, found, strict=True)
    )


def test_a_trainer_on_two_processes_with_packed_documents_says_bitwise_what_the_engine_says() -> None:
    shape = {"vocab_size": 64, "dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 48, "max_seq_len": 64}
    run = closed(shape, **{"mesh.dp_shard": 2, "data.seq_len": 48, "train.kernels": "exact", "train.precision": "fp32"})
    drawn = torch.Generator().manual_seed(5)
    texts = [torch.randint(0, 64, (n,), generator=drawn).tolist() for n in (20, 28, 33, 15)]

    def rank(rank: int, world: int) -> tuple[Tensor, Tensor]:
        place = lay_out(rank, world, torch.device("cpu"), Sizes.of(run.mesh), False)
        model = build(run, place).module
        pair = texts[2 * rank : 2 * rank + 2]
        row = torch.tensor([[*pair[0], *pair[1]]])
        documents = torch.cat([torch.full((1, len(t)), i) for i, t in enumerate(pair)], 1)
        positions = torch.cat([torch.arange(len(t))[None] for t in pair], 1)
        spread = F.log_softmax(model(row, positions, documents), -1, dtype=torch.float32)
        loss = model(row, positions, documents, row.roll(-1, 1))
        loss.backward()
        grads = [p.grad for p in model.parameters()]
        assert all(grad is not None for grad in grads)
        return spread[0, :-1].gather(-1, row[0, 1:, None])[:, 0].detach(), loss.detach()

    found = run_ranks(rank, 2)
    alone = Decoder(build(run, lay_out(0, 1, torch.device("cpu"), Sizes.of(closed(shape).mesh), False)).shape)
    alone.init_weights(run.seed)
    engine = Engine(alone, vocab_size=64, exact=True)
    for number, text in enumerate(texts):
        logprobs = found[number // 2][0][len(texts[number - 1]) if number % 2 else 0 :][: len(text) - 1].tolist()
        [scored] = engine.score([(text[:1], text[1:])])
        assert list(scored.logprobs) == logprobs


def test_gradients_are_the_ordinary_ones(tmp_path: Path) -> None:
    tokens = torch.randint(0, VOCAB, (2, 40), generator=torch.Generator().manual_seed(2))

    def grads(model: Decoder) -> dict[str, Tensor]:
        model(tokens, targets=tokens.roll(-1, 1)).backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    plain, same = made("qwen3-moe", tmp_path / "a"), made("qwen3-moe", tmp_path / "b")
    same.load_state_dict(plain.state_dict())
    exact.apply(same)
    wanted, found = grads(plain), grads(same)
    assert wanted.keys() == found.keys()
    for name, grad in wanted.items():
        torch.testing.assert_close(found[name], grad, rtol=2e-3, atol=2e-4 * float(grad.abs().max()))


@pytest.mark.parametrize(("name", "words"), [("bamba", "state-space"), ("llama-dynamic", "dynamic angles")])
def test_what_has_no_such_mode_is_refused(name: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=words):
        Engine(made(name, tmp_path), vocab_size=VOCAB, exact=True)


def test_a_machine_whose_products_depend_on_their_neighbours_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_its_place(x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight) * (1 + 1e-6 * torch.arange(len(x))[:, None])

    monkeypatch.setattr(exact, "tiles", of_its_place)
    with pytest.raises(SetupError, match="not possible on this machine: a product with a matrix of 8 x 24"):
        exact.probe_product.__wrapped__((8, 24))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mesh.tp": 2}, "mesh.tp cuts its products"),
        ({"mesh.cp": 2}, "mesh.cp cuts its texts"),
        ({"train.compile": True}, "train.compile makes other code"),
    ],
)
def test_layouts_that_compute_a_token_in_parts_are_refused(changes: dict[str, Any], words: str) -> None:
    from shoal.parallel.build import _refuse_inexact

    shape = {"vocab_size": 64, "dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 48}
    with pytest.raises(SpecError, match=words):
        _refuse_inexact(closed(shape, **{"train.kernels": "exact", **changes}))

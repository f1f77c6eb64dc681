"""Generation: seeded, bounded, ended by the end token."""

from __future__ import annotations

import pytest
import torch

from shoal.errors import NumericsError, UsageError
from shoal.model.decoder import Decoder
from shoal.model.generate import generate
from shoal.spec.model import Model
from shoal.spec.shape import shape_of

VOCAB = 40


@pytest.fixture(scope="module")
def model() -> Decoder:
    shape = shape_of(Model(vocab_size=VOCAB, dim=32, layers=2, heads=2, ffn_dim=48, max_seq_len=12, init_std=0.2))
    model = Decoder(shape)
    model.init_weights(3)
    return model


@torch.no_grad()
def likeliest(model: Decoder, ids: list[int]) -> int:
    return int(model(torch.tensor([ids]))[0, -1].argmax())


def test_greedy_takes_the_likeliest_token_each_time_within_the_context(model: Decoder) -> None:
    new = generate(model, [1, 2, 3], 20, temperature=0)
    whole = [1, 2, 3]
    for token in new:
        assert token == likeliest(model, whole[-12:])
        whole.append(token)
    assert len(new) == 20


def test_a_seed_gives_the_same_text_and_another_seed_another(model: Decoder) -> None:
    first, again, other = (generate(model, [5], 30, temperature=1.0, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert len(set(first)) > 5


def test_it_ends_before_the_end_token(model: Decoder) -> None:
    free = generate(model, [1, 2, 3], 10, temperature=0)
    assert generate(model, [1, 2, 3], 10, temperature=0, eos_id=free[4]) == free[: free.index(free[4])]


def test_top_1_is_greedy_and_a_small_top_k_stays_among_the_likeliest(model: Decoder) -> None:
    assert generate(model, [7, 8], 10, temperature=1.0, top_k=1) == generate(model, [7, 8], 10, temperature=0)
    with torch.no_grad():
        best = model(torch.tensor([[7, 8]]))[0, -1].topk(3).indices.tolist()
    assert {generate(model, [7, 8], 1, 5.0, top_k=3, seed=seed)[0] for seed in range(40)} == set(best)


def test_rows_beyond_the_tokenizer_are_never_drawn(model: Decoder) -> None:
    assert max(generate(model, [1], 200, temperature=5.0)) >= 20
    assert max(generate(model, [1], 200, temperature=5.0, vocab_size=20)) < 20


def test_a_prompt_that_the_model_cannot_read_is_refused(model: Decoder) -> None:
    with pytest.raises(UsageError, match="at least one token"):
        generate(model, [], 5)
    with pytest.raises(UsageError, match="token 40, but the model knows 40"):
        generate(model, [1, 40], 5)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_weights_that_are_no_numbers_are_said_to_be_so(temperature: float) -> None:
    model = Decoder(shape_of(Model(vocab_size=VOCAB, dim=32, layers=1, heads=2, ffn_dim=48)))
    model.init_weights(3)
    with torch.no_grad():
        model.norm.weight[0] = float("nan")
    with pytest.raises(NumericsError, match="after 2 tokens its logits are not finite"):
        generate(model, [1, 2], 5, temperature=temperature)

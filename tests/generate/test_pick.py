"""Picking: as transformers leaves tokens out, and as often as they are likely."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from shoal.generate.pick import Chooser, pick, shares, uniform
from shoal.generate.request import Sampling

LOGITS = torch.randn(40, 64, generator=torch.Generator().manual_seed(1)) * 3


@pytest.mark.parametrize(
    ("asked", "theirs"),
    [
        ({"temperature": 0.7}, [TemperatureLogitsWarper(0.7)]),
        ({"top_k": 5}, [TopKLogitsWarper(5)]),
        ({"top_p": 0.8}, [TopPLogitsWarper(0.8)]),
        ({"top_p": 1e-6}, [TopPLogitsWarper(1e-6)]),
        ({"min_p": 0.1}, [MinPLogitsWarper(0.1)]),
        (
            {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
            [TemperatureLogitsWarper(1.5), TopKLogitsWarper(20), TopPLogitsWarper(0.9), MinPLogitsWarper(0.02)],
        ),
    ],
)
def test_what_may_be_drawn_is_what_transformers_draws_from(asked: dict[str, Any], theirs: list[Any]) -> None:
    wanted = LogitsProcessorList(theirs)(torch.zeros(len(LOGITS), 1, dtype=torch.int64), LOGITS.double()).softmax(-1)
    found = torch.stack([shares(row, Sampling(**asked)) for row in LOGITS])
    torch.testing.assert_close(found / found.sum(-1, keepdim=True), wanted, rtol=1e-9, atol=1e-12)


def test_the_repetition_penalty_is_that_of_transformers() -> None:
    prompt, answer = [1, 2, 3, 1], [5, 9]
    theirs = RepetitionPenaltyLogitsProcessor(1.7)
    for row in LOGITS:
        wanted = theirs(torch.tensor([[*prompt, *answer]]), row[None]).argmax()
        chooser = Chooser(Sampling(temperature=0, repetition_penalty=1.7), 64, None, prompt, answer)
        assert pick(row[None], [chooser]) == [int(wanted)]


def test_penalties_on_the_answer_grow_with_what_was_said() -> None:
    logits = torch.tensor([[5.0, 4.5, 4.0]])

    def chosen(answer: list[int], **asked: Any) -> int:
        return pick(logits, [Chooser(Sampling(temperature=0, **asked), 3, None, [0], answer)])[0]

    assert chosen([0], presence_penalty=0.4) == 0
    assert chosen([0], presence_penalty=0.6) == 1
    assert chosen([0], frequency_penalty=0.4) == 0
    assert chosen([0, 0], frequency_penalty=0.4) == 1
    assert chosen([], presence_penalty=9.0) == 0  # what stands in the prompt alone is free


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    logits, draws = torch.tensor([0.0, 1.0, 2.0, -50.0]), 4000
    found = torch.zeros(4)
    for seed in range(draws):
        found[pick(logits[None], [Chooser(Sampling(seed=seed), 4)])[0]] += 1
    expected = logits.softmax(-1) * draws
    assert found[3] == 0
    assert float(((found - expected).square() / expected)[:3].sum()) < 13.8  # chi square, 2 degrees: one in a thousand


def test_draws_of_one_seed_are_spread_and_do_not_depend_on_others() -> None:
    drawn = [uniform(seed, position) for seed in range(50) for position in range(50)]
    assert len(set(drawn)) == 2500
    assert sum(drawn) / 2500 == pytest.approx(0.5, abs=0.02)
    assert uniform(3, 4) == uniform(3, 4)

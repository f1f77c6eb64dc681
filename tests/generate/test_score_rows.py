"""Texts that begin alike lie in one row, their beginning once, and each is worth what it is worth alone."""

from __future__ import annotations

import random

import pytest

from shoal.generate.opened import Wanted, of_folder
from shoal.generate.score import ROW, _alone, rows_of, score
from shoal.model.decoder import Decoder
from tests.evaluate import tiny

Item = tuple[list[int], list[int]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = tmp_path_factory.mktemp("model")
    tiny.write_model(folder, False)
    return of_folder(folder, Wanted("cpu")).model


def items(seed: int) -> list[Item]:
    draw = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(300) for _ in range(count)]

    heads, made = [tokens(30), tokens(12), tokens(3), []], []
    for _ in range(40):
        head = draw.choice(heads)
        context = list(head) if head and draw.random() < 0.2 else [*head, *tokens(draw.randrange(1, 20))]
        made += [(context, tokens(draw.randrange(1, 6))) for _ in range(draw.randrange(1, 4))]
    return made


@pytest.mark.parametrize("seed", range(3))
def test_beside_others_a_text_is_worth_what_it_is_worth_alone(model: Decoder, seed: int) -> None:
    asked = items(seed)
    for number, one in enumerate(score(model, asked)):
        alone = _alone(model, asked, [number])[number]
        assert one.logprobs == pytest.approx(alone.logprobs, abs=1e-4)
        assert one.greedy == alone.greedy


def test_what_contexts_have_in_common_is_computed_once() -> None:
    head = list(range(100))
    asked: list[Item] = [([*head, 200 + n], [1, 2]) for n in range(20)]
    rows = list(rows_of(list(enumerate(asked))))
    assert [row.length for row in rows] == [100 + 20 * 2]
    assert sorted(number for row in rows for number, _ in row.asked) == list(range(20))


def test_a_row_is_no_longer_than_it_may_be_but_for_what_is_shared() -> None:
    asked: list[Item] = [([7] * 600 + [n // 2, n], [1] * 9) for n in range(200)]
    rows = list(rows_of(list(enumerate(asked))))
    assert 1 < len(rows) < 10
    assert all(row.length <= 600 + ROW + 20 for row in rows)
    assert sorted(number for row in rows for number, _ in row.asked) == list(range(200))

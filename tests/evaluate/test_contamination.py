"""What a task shares with training data is found wherever it lies in the shards, and nothing else is."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.data.shards import TokenShards
from shoal.data.tokenizer import load_tokenizer
from shoal.errors import DataError
from shoal.evaluate import contamination as module
from shoal.evaluate.contamination import Text, contamination, sentence, stretches, words_of
from shoal.evaluate.generated.dice import Dice
from tests.data.reading import write_data_set

WORDS = [f"{a}{b}{c}" for a in "bdfgk" for b in "aeiou" for c in "lmnrst"]


def prose(dice: Dice, count: int) -> str:
    """Of few words, so that only their order tells two texts apart."""
    return " ".join(dice.one(WORDS) for _ in range(count))


def data_set(folder: Path, shards: list[list[str]]) -> TokenShards:
    tokenizer = load_tokenizer("byte")
    end = tokenizer.eos_id
    return write_data_set(folder, [[[*tokenizer.encode(text), end] for text in texts] for texts in shards])


def test_items_that_are_in_the_data_are_found_and_no_others(tmp_path: Path) -> None:
    items = [prose(Dice("item", k), 30) for k in range(40)]
    texts = [prose(Dice("data", k), 400) for k in range(30)]
    texts[7] += f"\n{items[3].upper().replace(' ', ', ')}!"  # another case and layout
    texts[20] = f"{items[11]} {texts[20]}"
    part = items[25].split()
    texts[29] += " " + " ".join(part[5 : 5 + 15])  # 15 words of 30: 3 of 18 runs
    texts[2] += " " + " ".join(items[30].split()[:12])  # one too few
    texts[4] += " " + " ".join(items[31].split()[:8])  # the end of one document and the beginning of the next
    texts[5] = " ".join(items[31].split()[8:16]) + " " + texts[5]
    source = data_set(tmp_path / "data", [texts[:10], texts[10:]])
    found = contamination([Text("t", str(k), text) for k, text in enumerate(items)], [source])
    assert (found.items, found.short, found.seen, found.mostly) == (40, 0, 3, 2)
    assert [(one.item, round(one.share, 3)) for one in found.worst] == [("3", 1.0), ("11", 1.0), ("25", 0.167)]
    assert [one.where.rpartition(", ")[2] for one in found.worst] == ["document 7", "document 20", "document 29"]
    assert found.worst[2].excerpt.startswith(" ".join(part[5:12]))
    assert found.tasks == {"t": 3}
    said = sentence(found)
    assert said.startswith("3 of 40 items have 13 words in a row with the data in common, and 2 of them more than half")


def test_a_run_across_two_stretches_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STRETCH", 1_000)
    monkeypatch.setattr(module, "OVERLAP", 200)
    texts = [Text("t", str(k), prose(Dice("item", k), 14)) for k in range(50)]
    source = data_set(tmp_path / "data", [[" ".join(text.text for text in texts)]])
    assert contamination(texts, [source]).mostly == 50


def test_every_token_is_looked_at_once_or_twice() -> None:
    seen = [k for begin, stop in stretches(200_000) for k in range(begin, stop)]
    assert set(seen) == set(range(200_000))
    assert len(seen) < 202_000


def test_short_items_are_counted_and_not_judged(tmp_path: Path) -> None:
    source = data_set(tmp_path / "data", [["12 + 5 = 17"]])
    found = contamination([Text("sums", "0", "12 + 5 = 17")], [source])
    assert (found.short, found.seen) == (1, 0)
    assert "cannot be said" in sentence(found)
    both = contamination([Text("sums", "0", "12 + 5"), Text("t", "1", prose(Dice("x"), 20))], [source])
    assert sentence(both).startswith("none of 1 items has 13 words in a row with the data in common (1 more")


def test_scripts_without_blanks_are_looked_at_letter_by_letter(tmp_path: Path) -> None:
    said = "鲸鱼是海洋里最大的动物它们用肺呼吸"
    source = data_set(tmp_path / "data", [[f"书上说{said}。"]])
    assert contamination([Text("t", "0", said)], [source]).mostly == 1
    assert words_of("Größe, naïve_x 3.5 鲸鱼") == ["größe", "naïve", "x", "3", "5", "鲸", "鱼"]


def test_too_many_items_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_RUNS", 10)
    source = data_set(tmp_path / "data", [["x"]])
    with pytest.raises(DataError, match="28 runs of 13 words, and 10 can be held"):
        contamination([Text("t", "0", prose(Dice("x"), 40))], [source])

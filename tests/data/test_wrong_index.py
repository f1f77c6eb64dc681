"""An index of a stranger: every field has its type and range, and leads nowhere else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.data.index import ShardInfo, fingerprint_of, parse_index
from shoal.errors import DataError, SetupError
from tests.data.reading import make_documents, write_data_set

BAD: list[Any] = [None, [], {}, "x", "", -1, 2.5, 257.0, 1 << 62, 10**30, True, [None], {"a": []}, "../../x", "a\0b"]


def spots(said: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = said.items() if isinstance(said, dict) else enumerate(said) if isinstance(said, list) else ()
    return [at, *(spot for key, value in inner for spot in spots(value, (*at, key)))]


@pytest.fixture
def index(tmp_path: Path) -> dict[str, Any]:
    write_data_set(tmp_path, [make_documents(5)])
    said: dict[str, Any] = json.loads((tmp_path / "index.json").read_text())
    return said | {"source": {"named": ["a.txt"], "skipped": {"empty": {"count": 1, "first": "a.txt:3"}}}}


def test_no_wrong_type_is_taken_or_a_defect(index: dict[str, Any]) -> None:
    parse_index(json.dumps(index), "data")
    for spot in spots(index):
        for new in BAD:
            said = json.loads(json.dumps(index))
            inner = said
            for key in spot[:-1]:
                inner = inner[key]
            if not spot:
                said = new
            elif inner[spot[-1]] == new and type(inner[spot[-1]]) is type(new):
                continue
            else:
                inner[spot[-1]] = new
            try:
                parse_index(json.dumps(said), "data")
            except (DataError, SetupError) as e:
                assert "\n" not in str(e)  # noqa: PT017
                assert len(str(e)) < 400  # noqa: PT017
            else:
                assert spot[0] in ("source", "start_id", "eos_id", "tokenizer") or spot[-1] == "name", (spot, new)
                assert new not in ("../../x", "a\0b") or spot[0] == "source", (spot, new)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"vocab_size": 257.0}, "vocab_size: 257.0 where a whole number belongs"),
        ({"vocab_size": True}, "vocab_size: True"),
        ({"tokenizer": "../../tokenizer.json"}, "no file of the data set's own folder"),
        ({"tokenizer": "/etc/passwd"}, "no file of the data set's own folder"),
        ({"has_mask": 0}, "has_mask: 0 where true or false belongs"),
        ({"shards": {}}, "shards: no list"),
    ],
)
def test_what_is_wrong_is_named(index: dict[str, Any], change: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError, match=says):
        parse_index(json.dumps(index | change), "data")


def test_a_vocabulary_of_257_0_is_refused_though_the_fingerprint_fits_it(index: dict[str, Any]) -> None:
    shards = [ShardInfo(**shard) for shard in index["shards"]]
    index |= {"vocab_size": 257.0, "fingerprint": fingerprint_of(shards, 257.0, index["dtype"])}  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"vocab_size: 257\.0 where a whole number belongs"):
        parse_index(json.dumps(index), "data")


def test_a_checksum_does_not_lead_out_of_the_cache(index: dict[str, Any]) -> None:
    index["shards"][0]["docs_xxh3"] = "../../../../../../../../../../etc/x"
    with pytest.raises(DataError, match="32 hexadecimal digits"):
        parse_index(json.dumps(index), "data")

"""What others wrote becomes values within bounds, or one error that says where."""

from __future__ import annotations

import json
import math
import tracemalloc
from pathlib import Path

import pytest

from shoal import values
from shoal.plain_file import read_object
from shoal.values import BadValue, OutOfRange, inside, read_json


@pytest.mark.parametrize(
    "said", [{"a": [1, 2.5, None, True, "é[["]}, [], 5, "x", [[1e-300, 2**62]], 1e14, {"k": "1e999"}]
)
def test_what_is_json_is_read_as_it_is(said: object) -> None:
    assert read_json(json.dumps(said).encode()) == said


def test_depth_is_bounded_before_anything_is_built() -> None:
    assert read_json(b"[" * 64 + b"]" * 64) is not None
    assert read_json(b'{"a":' * 3 + b"1" + b"}" * 3, most_depth=3) == {"a": {"a": {"a": 1}}}
    for deep in (b"[" * 65 + b"]" * 65, b'{"a":[' * 40 + b"]}" * 40, b"[" * 1_000_000):
        with pytest.raises(BadValue, match="64 deep"):
            read_json(deep)


def test_brackets_and_commas_in_texts_are_no_depth() -> None:
    said = {"t": "[" * 500 + '"' + "\\", "u": ["]" * 70]}
    assert read_json(json.dumps(said).encode()) == said


def test_the_count_of_values_is_bounded_before_anything_is_built() -> None:
    with pytest.raises(BadValue, match="more than 10 values"):
        read_json(b"[" + b"1," * 20 + b"1]", most_parts=10)


def test_the_length_of_a_text_is_bounded_before_it_is_looked_at() -> None:
    assert read_json(b"[" + b" " * 48 + b"]", most_bytes=50) == []
    with pytest.raises(BadValue, match="51 bytes, where at most 50"):
        read_json(b"[" + b" " * 49 + b"]", most_bytes=50)


@pytest.mark.parametrize("block", [1, 2, 3, 5, 8, 1000])
def test_texts_are_told_from_the_rest_at_any_border_of_a_block(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "_BLOCK", block)
    texts = ["\\", '"[', '\\"', '\\\\,"', "", "é\n", 'x\\\\"[[', "\\" * 9 + '"' * 4]
    data = json.dumps([texts, {"\\,[": {}}]).encode()
    parts = 2 + 2 + len(texts)  # lists, objects, commas
    assert read_json(data, most_parts=parts) == [texts, {"\\,[": {}}]
    with pytest.raises(BadValue, match=f"more than {parts - 1} values"):
        read_json(data, most_parts=parts - 1)


@pytest.mark.parametrize(
    "data",
    [
        b"{" + b",".join(b'"%05x":"%05x"' % (i, i) for i in range(58_000)) + b"}",
        b"[" + b",".join(b'{"%05x":1.5}' % i for i in range(31_000)) + b"]",
        b'["' + b"\\u00e9" * 174_000 + b'"]',
    ],
    ids=["names", "objects", "escapes"],
)
def test_reading_takes_no_more_memory_than_is_said(data: bytes) -> None:
    """A sixteenth of what `read_json` allows, and of its 256 MiB."""
    tracemalloc.start()
    try:
        read_json(data, most_parts=values.MOST_PARTS // 16, most_bytes=values.MOST_BYTES // 16)
        assert tracemalloc.get_traced_memory()[1] < 256 << 20 >> 4
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "said", [b"1e999", b"[-1E+400]", b"123456789012345678901", b"NaN", b"[Infinity]", b'{"a":-Infinity}']
)
def test_no_number_without_an_end(said: bytes) -> None:
    with pytest.raises(BadValue):
        read_json(said)
    assert not math.isnan(read_json(b"0.5"))


@pytest.mark.parametrize(
    "said", [b"", b"{", b"\xff\xfe", b'{"a" 1}', b"\x00", '{"a":\ud800}'.encode("utf-8", "surrogatepass")]
)
def test_what_is_no_json_is_said_to_be_none(said: bytes) -> None:
    with pytest.raises(BadValue, match="no JSON"):
        read_json(said)


def test_an_error_names_its_place_from_the_outside_in() -> None:
    with pytest.raises(OutOfRange) as caught, inside("config.json"), inside("layers"):
        raise OutOfRange("-1 where a whole number belongs")
    assert str(caught.value) == "config.json: layers: -1 where a whole number belongs"


def test_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[1]")
    with pytest.raises(BadValue, match=r"a\.json: a list where a JSON object belongs"):
        read_object(tmp_path / "a.json")


def test_json_is_utf8_with_whole_characters() -> None:
    assert read_json(b'\xef\xbb\xbf{"a": "\\ud83d\\ude00"}') == {"a": "\U0001f600"}
    with pytest.raises(BadValue, match="no JSON"):  # 400 digits, which would have been looked for in vain
        read_json(("9" * 400).encode("utf-16"))
    with pytest.raises(BadValue, match="half a character"):
        read_json(b'{"a": ["\\ud800"]}')


def test_fields_are_refused_at_their_names() -> None:
    read = {"a": values.whole, "b": values.maybe(values.each(values.short))}
    assert values.made(dict, {"a": 1, "b": ["x"]}, **read) == {"a": 1, "b": ["x"]}
    for said, place in (
        ({"a": True}, "a: True"),
        ({"b": [1]}, "b: 1"),
        ({"c": 1}, "c: it is not known"),
        (5, "5 where"),
    ):
        with pytest.raises(BadValue, match=place):
            values.made(dict, said, **read)
    for path in ("../a", "/a", "a/../b", "", "a\0", "a\\b"):
        with pytest.raises(BadValue):
            values.below(path)
    assert values.below("a/b.json") == "a/b.json"
    for number in (0, -1, 1 << 23, True):
        with pytest.raises(BadValue):
            values.pid(number)

"""Long texts are cut only where it is proven to change nothing, and where it is proven they are cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from shoal.data import patterns
from shoal.data.decoding import continued
from shoal.data.tokenizer import PIECE_CHARS, JsonTokenizer
from shoal.data.word_ids import GPT2, GPT4, QWEN2
from tests.data.preparing import make_texts
from tests.data.test_tokenizer import TRICKY
from tests.data.tokenizer_kinds import BYTES, O200K, kinds, random_kind

KINDS = kinds()
SPACED = [
    *("gpt2", "bytes as they are", "smollm2", "llama 3", "o200k", "deepseek", "split with prefix"),
    *("mistral", "metaspace always", "metaspace never", "metaspace first", "metaspace whole always"),
    *("unigram, t5 style", "unigram, xlm-r style", "unigram, quotes", "bert as it is", "words", "delimiter"),
]
PARTS = [*TRICKY, *("▁", "a b", "x\n", "\nY", "й", "и\u0306", "ᄀ", "ᅡ", "अ", "\u0d4e", "\u0600", "<right> ", "whole ")]


def made(name: str, piece_chars: int, special: bool = False) -> JsonTokenizer:
    """The file alone; what the folder makes of it is another question."""
    return JsonTokenizer(KINDS[name]().library.to_str(), name, 0, "none", special=special, piece_chars=piece_chars)


def of_the_whole(tokenizer: JsonTokenizer, text: str) -> list[int]:
    return list(tokenizer._encoder.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("name", SPACED)
def test_prose_is_cut_for_every_kind_for_which_that_can_be_shown(name: str) -> None:
    tokenizer = made(name, 50)
    text = " ".join(make_texts(10))
    assert tokenizer.exact_cut
    assert len(tokenizer._cut(text)) > len(text) / 100
    assert tokenizer.encode(text) == of_the_whole(tokenizer, text)


@pytest.mark.parametrize("name", ["pairs of words", "unigram in one", "letters"])
def test_others_are_encoded_whole_where_no_blank_tells(name: str) -> None:
    tokenizer = made(name, 50)
    text = "".join("".join(make_texts(4)).split())
    assert tokenizer._cut(text) == [text]
    assert tokenizer.encode(text) == of_the_whole(tokenizer, text)


def test_lines_of_a_text_without_blanks_are_cut() -> None:
    tokenizer = made("llama 3", 50)
    text = "鯨は海にいる。\n" * 100
    assert len(tokenizer._cut(text)) >= 10
    assert tokenizer.encode(text) == of_the_whole(tokenizer, text)


@pytest.mark.parametrize("special", [False, True])
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_pieces_of_any_size_give_the_ids_of_the_whole(special: bool, data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 60))
    tokenizer = random_tokenizer(seed, special)
    text = "".join(data.draw(st.lists(st.sampled_from(PARTS), min_size=4, max_size=30)))
    tokenizer._piece_chars = data.draw(st.integers(1, 20))
    try:
        whole = of_the_whole(tokenizer, text)
    except Exception:  # of the library: a token for the unknown that is itself unknown
        return
    assert tokenizer.encode_batch([text])[0].tolist() == whole


_MADE: dict[tuple[int, bool], JsonTokenizer] = {}


def random_tokenizer(seed: int, special: bool) -> JsonTokenizer:
    if (seed, special) not in _MADE:
        content = random_kind(seed).library.to_str()
        _MADE[seed, special] = JsonTokenizer(content, f"seed {seed}", 0, "none", special=special)
    return _MADE[seed, special]


def test_a_merge_over_a_blank_forbids_the_cut_before_it() -> None:
    """A BPE of the whole text: which characters no merge joins decides."""
    spec = json.loads(KINDS["llama 2"]().library.to_str())
    vocab: dict[str, int] = {piece: i for i, piece in enumerate(["<unk>", *BYTES, "a", "b", "▁", "▁b", "a▁b"])}
    spec["model"] |= {"vocab": vocab, "merges": [["▁", "b"]]}
    spec["added_tokens"] = []
    text = "a b " * 40
    apart = JsonTokenizer(json.dumps(spec), "x", 0, "none", piece_chars=20)
    spec["model"]["merges"].append(["a", "▁b"])
    joined = JsonTokenizer(json.dumps(spec), "x", 0, "none", piece_chars=20)
    assert apart._cuts is not None
    assert joined._cuts is not None
    assert apart._cuts.exact(text, 1)
    assert not joined._cuts.exact(text, 1)
    assert joined._cuts.exact(text, 3)  # between b and the blank there is still none
    assert joined.encode(text) == of_the_whole(joined, text)


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("bert as it is", "\n", "they'll — sail “No!” “Yes” — "),  # which its normalizer makes a blank
        ("o200k", "  ", "x  b  < the  y  =  1 "),
        ("gpt2", " ", "the whale -- and the sea - is "),
    ],
)
def test_an_added_token_of_blanks_that_looks_at_its_neighbours_forbids_a_cut_at_a_blank(
    name: str, content: str, text: str
) -> None:
    library = KINDS[name]().library
    library.add_tokens([AddedToken(content, normalized=True, single_word=True)])
    tokenizer = JsonTokenizer(library.to_str(), name, 0, "none", special=True)
    whole = of_the_whole(tokenizer, text * 4)
    for tokenizer._piece_chars in range(5, 30):
        assert tokenizer.encode(text * 4) == whole


@pytest.mark.parametrize("pattern", [GPT2, GPT4, QWEN2, O200K])
def test_the_expressions_in_use_are_read(pattern: str) -> None:
    found = patterns.read(pattern)
    assert found is not None
    assert found.apart("b", "a", " ")
    assert found.takes(" ")
    assert found.apart("b", "\n", "a")
    assert not found.apart(" ", "\n", "a")  # " \n" is one piece, or two, by what follows
    assert not found.apart("x", "a", "b")
    assert not found.apart("a", " ", "b")


@pytest.mark.parametrize("pattern", ["(?<=a)b", "a*?", "^a", "a$", r"\bx", r"[[:alpha:]]", "(ab)+", "[a&&b]", "a("])
def test_nothing_is_claimed_about_others(pattern: str) -> None:
    assert patterns.read(pattern) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["gpt2", "bytes as they are", "mistral", "metaspace first", "unigram, t5 style", "bert as it is"]
)
@pytest.mark.parametrize("blanks", [True, False])
def test_a_document_of_real_size_gets_the_ids_of_the_whole(name: str, blanks: bool) -> None:
    text = "\n".join(make_texts(5200))
    text = text if blanks else "".join(text.split())
    assert len(text) > 2 * PIECE_CHARS
    tokenizer = made(name, PIECE_CHARS)
    assert tokenizer.encode_batch([text])[0].tolist() == of_the_whole(tokenizer, text)


@pytest.mark.parametrize("text", ["Die Grüße 海は 🐳 end", " two  words", "the whale's sea."])
@pytest.mark.parametrize("name", ["gpt2", "llama 2", "mistral", "unigram, t5 style", "bert as it is"])
def test_a_part_is_decoded_as_it_reads_after_what_stands_before_it(name: str, text: str) -> None:
    """At every seam, also within a character."""
    tokenizer = made(name, 1000)
    ids = tokenizer.encode(text)
    whole = tokenizer.decode(ids)
    for seam in range(1, len(ids)):
        before = tokenizer.decode(ids[:seam])
        after = continued(tokenizer, ids[:seam], ids[seam:])
        assert whole.endswith(after)
        kept = whole[: len(whole) - len(after)]
        assert before.startswith(kept)
        assert set(before[len(kept) :]) <= {"\ufffd"}  # nothing but a character that was not complete is taken back

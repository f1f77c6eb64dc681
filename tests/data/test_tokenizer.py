"""Tokenizers: what is loaded, what ends a document, and that the fast way gives the very ids of the library."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from shoal.data import word_ids
from shoal.data.prepare.data_set import prepare
from shoal.data.tokenizer import JsonTokenizer, load_tokenizer
from shoal.errors import DataError
from tests.data.preparing import make_texts, small_bpe, write_jsonl

# What the rules about spaces could trip over: runs of them, other spaces, marks that combine with one, added tokens.
TRICKY = [
    *(" ", "  ", "\n", "\n\n", " \n", "\t", "\r\n", "\u00a0", "\u2003", "\u3000", "\u180e", "\u200b", "\x1c", "\x85"),
    *("a", "Ab", "'s", "'S", "'", "ll", "1", "1851", "²", ".", "?!", "_", "é", "e\u0301", "\u0301", "ſ", "海", "🐳"),
    *("<|endoftext|>", "<added>", "<left>", "\u2028", "\ufeff", "\0"),
]
FAST = ["gpt2", "prefix", "smollm2", "gpt2-split", "llama3", "qwen2"]
ADDED = [AddedToken("<added>"), AddedToken("<left>", lstrip=True), AddedToken("whole", single_word=True)]


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, JsonTokenizer]:
    kinds = [*FAST, "metaspace", "other"]
    return {kind: JsonTokenizer(small_bpe(kind, added=ADDED).to_str(), kind, "<|endoftext|>") for kind in kinds}


def library_ids(tokenizer: JsonTokenizer, text: str) -> list[int]:
    return list(Tokenizer.from_str(tokenizer.content).encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("kind", FAST)
@given(parts=st.lists(st.sampled_from(TRICKY) | st.text(max_size=3), max_size=12))
@settings(max_examples=100, deadline=None)
def test_looking_words_up_gives_the_ids_of_the_library(
    tokenizers: dict[str, JsonTokenizer], kind: str, parts: list[str]
) -> None:
    text = "".join(parts)
    assert tokenizers[kind].looks_words_up
    assert tokenizers[kind].encode_batch([text])[0].tolist() == tokenizers[kind].encode(text)


@pytest.mark.parametrize("kind", FAST)
def test_real_prose_gets_the_ids_of_the_library(tokenizers: dict[str, JsonTokenizer], kind: str) -> None:
    text = (Path(__file__).parents[2] / "examples/text/moby-dick.txt").read_text(encoding="utf-8")[:60_000]
    assert tokenizers[kind].encode_batch([text])[0].tolist() == library_ids(tokenizers[kind], text)


@pytest.mark.parametrize("kind", ["metaspace", "other"])
def test_a_tokenizer_whose_pieces_may_span_words_is_left_to_the_library(
    tokenizers: dict[str, JsonTokenizer], kind: str
) -> None:
    texts = make_texts(20)
    assert not tokenizers[kind].looks_words_up
    assert [ids.tolist() for ids in tokenizers[kind].encode_batch(texts)] == [
        library_ids(tokenizers[kind], text) for text in texts
    ]


@pytest.mark.parametrize("added", [AddedToken("<r>", rstrip=True), AddedToken("two words")])
def test_an_added_token_that_reaches_over_a_space_turns_the_fast_way_off(added: AddedToken) -> None:
    tokenizer = JsonTokenizer(small_bpe(added=[added]).to_str(), "here")
    text = f"a whale {added.content} and\n {added.content}  more"
    assert not tokenizer.looks_words_up
    assert tokenizer.encode_batch([text])[0].tolist() == library_ids(tokenizer, text)


def test_forgetting_words_when_there_are_too_many_changes_no_id(
    monkeypatch: pytest.MonkeyPatch, tokenizers: dict[str, JsonTokenizer]
) -> None:
    content = tokenizers["gpt2"].content
    monkeypatch.setattr(word_ids, "MAX_WORDS", 5)
    text = " ".join(make_texts(30))
    assert JsonTokenizer(content, "here").encode_batch([text])[0].tolist() == library_ids(tokenizers["gpt2"], text)


def test_bytes_are_their_own_ids() -> None:
    tokenizer = load_tokenizer("byte")
    text = "Grüße, 海 🐳\n"
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (257, 256)
    assert tokenizer.encode(text) == list(text.encode()) == tokenizer.encode_batch([text])[0].tolist()
    assert tokenizer.decode([*text.encode(), 256]) == text
    assert tokenizer.decode([0xE6, 65]) == "\ufffdA"  # a model may stop in the middle of a character


def test_truncation_and_padding_in_the_file_are_ignored(tmp_path: Path) -> None:
    library = small_bpe()
    library.enable_truncation(4)
    library.enable_padding(direction="left", length=9, pad_id=5)
    library.save(str(tmp_path / "tokenizer.json"))
    texts = make_texts(5)
    tokenizer = load_tokenizer(tmp_path)
    assert [tokenizer.decode(ids.tolist()) for ids in tokenizer.encode_batch(texts)] == texts
    assert [tokenizer.decode(tokenizer.encode(t)) for t in texts] == texts
    assert tokenizer.start_id == 0  # and padding is no template


def test_the_vocabulary_reaches_to_its_highest_id_even_with_holes(tmp_path: Path) -> None:
    spec = json.loads(small_bpe().to_str())
    spec["added_tokens"].append({**spec["added_tokens"][0], "id": 70_000, "content": "<far>"})
    spec["model"]["vocab"]["<far>"] = 70_000
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    tokenizer = load_tokenizer(tmp_path, special=True)
    assert tokenizer.vocab_size == 70_001
    ids = tokenizer.encode_batch(["a <far> b"])[0]
    assert ids.dtype == np.uint32
    assert 70_000 in ids.tolist()


@pytest.mark.parametrize("name", ["<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>"])
def test_the_usual_names_of_the_end_are_found(tmp_path: Path, name: str) -> None:
    (tmp_path / "tokenizer.json").write_text(small_bpe().to_str().replace("<|endoftext|>", name))
    assert load_tokenizer(tmp_path).eos_id == 0


def test_the_folder_of_a_model_says_which_token_ends_a_text(tmp_path: Path) -> None:
    library = small_bpe()
    library.add_special_tokens(["<|im_end|>"])
    library.save(str(tmp_path / "tokenizer.json"))
    end = library.token_to_id("<|im_end|>")
    assert load_tokenizer(tmp_path).eos_id == 0
    for value in ("<|im_end|>", {"content": "<|im_end|>"}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": value}))
        assert load_tokenizer(tmp_path).eos_id == end
    assert load_tokenizer(tmp_path, eos="<|endoftext|>").eos_id == 0


@pytest.mark.parametrize("name", ["tokenizer_config", "special_tokens_map", "added_tokens", "config"])
@pytest.mark.parametrize("text", ["[" * 200_000, '{"bos_token": ' * 100_000, "[1]", "no JSON"])
def test_a_broken_file_beside_the_tokenizer_is_named(tmp_path: Path, name: str, text: str) -> None:
    small_bpe().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / f"{name}.json").write_text(text)
    with pytest.raises(DataError, match=f"{name}.json.*correct it, or take the file away"):
        load_tokenizer(tmp_path)


def test_without_a_known_end_of_text_one_has_to_be_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(small_bpe().to_str().replace("<|endoftext|>", "[STOP]"))
    with pytest.raises(DataError, match=r"none of the usual end-of-text tokens .* name the token .* with --eos"):
        load_tokenizer(tmp_path)
    assert load_tokenizer(tmp_path, eos="[STOP]").eos_id == 0
    with pytest.raises(DataError, match="has no token '<stop>', which --eos names"):
        load_tokenizer(tmp_path, eos="<stop>")
    with pytest.raises(DataError, match="leave out --eos"):
        load_tokenizer("byte", eos="x")


def test_a_data_set_brings_its_tokenizer_along(tmp_path: Path) -> None:
    from shoal.data.prepare.data_set import Options

    corpus = write_jsonl(tmp_path / "a.jsonl", make_texts(3))
    (tmp_path / "tokenizer.json").write_text(small_bpe().to_str().replace("<|endoftext|>", "[STOP]"))
    prepare([str(corpus)], tmp_path / "bytes", Options(quiet=True))
    prepare([str(corpus)], tmp_path / "bpe", Options(tokenizer=str(tmp_path), eos="[STOP]", quiet=True))
    assert load_tokenizer(tmp_path / "bytes").name == "byte"
    assert load_tokenizer(tmp_path / "bpe").eos_id == 0  # the index says which, where the tokenizer itself does not


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{}", "is no tokenizer that can be used"),
        (b"not json", "is no tokenizer that can be used"),
        (b'{"version": "1.0", "model": {"type": "Nonsense"}}', "is no tokenizer that can be used"),
        (b"\xff\xfe\x00", "is not UTF-8"),
        (None, "there is no tokenizer at"),
    ],
)
def test_a_broken_tokenizer_file_is_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_tokenizer(tmp_path)

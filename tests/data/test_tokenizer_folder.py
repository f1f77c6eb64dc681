"""A tokenizer is what AutoTokenizer makes of the folder: for every kind, every text and every file of the folder."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Library

import tests.model.families  # noqa: F401  # sets transformers offline before it is imported
from shoal.data import tokenizer as tokenizer_module
from shoal.data.prepare.data_set import Options, prepare
from shoal.data.shards import TokenShards
from shoal.data.tokenizer import JsonTokenizer, load_tokenizer
from shoal.errors import DataError
from tests.data.preparing import make_texts
from tests.data.tokenizer_kinds import Kind, kinds, random_kind, texts_to_try

KINDS = kinds()


@pytest.fixture(autouse=True)
def long_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of more than so many characters are encoded in pieces, where that can be shown to change nothing."""
    monkeypatch.setattr(tokenizer_module, "PIECE_CHARS", 100)


def compare(folder: Path, kind: Kind, texts: dict[str, str]) -> None:
    from transformers import AutoTokenizer

    try:
        theirs = AutoTokenizer.from_pretrained(folder)
    except Exception:  # whatever it is; ours has one kind of error
        with contextlib.suppress(DataError):
            load_tokenizer(folder, eos=kind.eos, start="none")
        return
    # As AutoTokenizer: what the folder says about special tokens in texts holds.
    ours = load_tokenizer(folder, eos=kind.eos, start="none", special=True)
    plain = load_tokenizer(folder, eos=kind.eos, start="none")
    assert isinstance(ours, JsonTokenizer)
    whole = Library.from_str(ours.content)  # by itself, with its template
    whole.no_truncation()
    whole.encode_special_tokens = theirs.split_special_tokens
    special = {t.content: i for i, t in whole.get_added_tokens_decoder().items() if t.special}
    unknown = special.get(
        str(getattr(whole.model, "unk_token", None)), 2 if "Unigram" in str(type(whole.model)) else None
    )
    for name, text in texts.items():
        try:
            ids = theirs(text, add_special_tokens=False).input_ids
        except Exception:  # of the library, such as a token for the unknown that is itself unknown
            with pytest.raises(DataError, match="is no tokenizer that can be used"):
                ours.encode(text)
            continue
        assert ours.encode(text) == ids, name
        assert ours.encode_batch([text, ""])[0].tolist() == ids, name
        stays = plain.encode(text)
        if any(token in text for token in special):  # which the model itself may have among its pieces
            assert not set(special.values()) - {theirs.unk_token_id, unknown} & set(stays), name
        else:
            assert stays == theirs(text, add_special_tokens=False, split_special_tokens=True).input_ids, name
        assert whole.encode(text).ids == theirs(text).input_ids, name
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), name
    if theirs.eos_token_id is not None:
        assert plain.eos_id == theirs.eos_token_id
    assert plain.vocab_size == max(theirs.get_vocab().values()) + 1


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_gives_the_ids_of_autotokenizer(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]()
    compare(kind.write(tmp_path), kind, texts_to_try())


@pytest.mark.parametrize("seeds", [range(30), pytest.param(range(30, 330), marks=pytest.mark.slow)])
def test_random_tokenizers_give_the_ids_of_autotokenizer(seeds: range, tmp_path: Path) -> None:
    for seed in seeds:
        kind = random_kind(seed)
        try:
            compare(kind.write(tmp_path / str(seed)), kind, texts_to_try(seed))
        except Exception as e:
            e.add_note(f"seed {seed}")
            raise


@pytest.mark.parametrize(
    ("name", "blanks"),
    [("llama 2", False), ("bytes as they are", False), ("unigram, t5 style", False), ("unigram in one", True)],
)
def test_a_long_document_is_prepared_with_the_ids_of_autotokenizer(
    name: str, blanks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the size where texts are cut. These kinds had other ids at the cuts."""
    from transformers import AutoTokenizer

    monkeypatch.setattr(tokenizer_module, "PIECE_CHARS", 1 << 18)
    text = " ".join(make_texts(2800))
    text = text if blanks else "".join(text.split())
    assert len(text) > 1 << 18
    (tmp_path / "a.txt").write_text(text)
    folder = KINDS[name]().write(tmp_path / "tokenizer")
    prepare([str(tmp_path / "a.txt")], tmp_path / "out", Options(str(folder), start="none", workers=1, quiet=True))
    found = TokenShards.open(tmp_path / "out")
    theirs = AutoTokenizer.from_pretrained(folder)
    ids = theirs(text, add_special_tokens=False, split_special_tokens=True).input_ids
    assert found.read(0, found.tokens)[0].tolist() == [*ids, theirs.eos_token_id]

"""What cannot be reproduced, is damaged, or would take too long is refused in one sentence that names it."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

import tests.model.families  # noqa: F401  # sets transformers offline before it is imported
from shoal.data import tokenizer as tokenizer_module
from shoal.data.tokenizer import JsonTokenizer, load_tokenizer
from shoal.data.tokenizer_classes import CLASS_OF, KNOWN, WRONGLY_NAMED, class_of
from shoal.data.tokenizer_library import MOST_PATTERN_CHARS, endless
from shoal.data.word_ids import GPT2, GPT4, QWEN2
from shoal.errors import DataError
from tests.data.preparing import shoal, small_bpe, write_jsonl
from tests.data.tokenizer_kinds import O200K, kinds


def test_the_tables_of_classes_are_those_of_the_transformers_that_is_installed() -> None:
    """When this fails, transformers has a new class: see whether it takes tokenizer.json as it is."""
    import transformers
    from transformers.models.auto import tokenization_auto as auto

    registered = {k: v.removesuffix("Fast") for k, v in auto.TOKENIZER_MAPPING_NAMES.items() if v is not None}
    assert {k: v for k, v in CLASS_OF.items() if k in registered} == registered
    assert set(WRONGLY_NAMED) == auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
    ends = ("Tokenizer", "TokenizerFast", "Backend")
    assert {name.removesuffix("Fast") for name in dir(transformers) if name.endswith(ends)} <= KNOWN


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "gpt2", "mistral", "gemma", "", "unheard"])
@pytest.mark.parametrize("named", [None, "LlamaTokenizerFast", "PreTrainedTokenizerFast", "GPT2Tokenizer", "Unheard"])
def test_the_class_is_the_one_that_autotokenizer_takes(model_type: str, named: str | None, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    small_bpe().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": named} if named else {}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type} if model_type else {}))
    theirs = type(AutoTokenizer.from_pretrained(tmp_path)).__name__
    assert class_of(model_type, "", None, named, byte_level=True) == theirs


@pytest.mark.parametrize(
    ("config", "setting"),
    [
        ({"tokenizer_class": "XLNetTokenizer"}, "the class XLNetTokenizer"),
        ({"auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}}, "auto_map: the tokenizer is code"),
        ({"init_inputs": [1]}, "init_inputs: arguments"),
        ({"fix_mistral_regex": True}, "fix_mistral_regex: transformers may replace"),
        ({"fast_tokenizer_files": ["tokenizer.4.0.json"]}, "fast_tokenizer_files: another file"),
        ({"tokenizer_class": "BertTokenizer"}, "tokenizer_class: a BertTokenizer has a WordPiece model"),
        ({"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": "no"}, "add_prefix_space: "),
        ({"eos_token": 5}, "eos_token: 5 where a text"),
        ({"eos_token": {"content": "x", "colour": True}}, "'colour' is no setting of a token"),
        ({"added_tokens_decoder": []}, "added_tokens_decoder: a list where an object belongs"),
        ({"added_tokens_decoder": {"-1": {"content": "x"}}}, "added_tokens_decoder: '-1' where a whole number"),
        ({"extra_special_tokens": "x"}, "extra_special_tokens: no list"),
        ({"split_special_tokens": 1}, "split_special_tokens: 1 where true or false belongs"),
        ({"tokenizer_class": 7}, "tokenizer_class: 7 where a text"),
    ],
)
def test_a_setting_that_is_not_reproduced_is_named(config: dict[str, Any], setting: str, tmp_path: Path) -> None:
    small_bpe().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>", **config}))
    with pytest.raises(DataError, match=setting):
        load_tokenizer(tmp_path)


def test_files_of_one_folder_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    """As one file has it "The" is found after letters are made small, as the other has it before; in memory the library
    remembers both, and no file could say that."""
    kind = kinds()["words"]()
    kind.library.add_tokens([AddedToken("The", normalized=True)])
    assert kind.config is not None
    kind.config["added_tokens_decoder"] = {"300": {"content": "The", "normalized": False, "special": True}}
    kind.write(tmp_path)
    with pytest.raises(DataError, match="The: the files of the folder contradict each other about this token"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("files", "missing"),
    [
        (["tokenizer.model"], r"a tokenizer.model \(SentencePiece\) is not read; open the folder with transformers"),
        (["vocab.json", "merges.txt"], "vocab.json, merges.txt alone with the tokenizer_class 'TokenizersBackend'"),
        ([], "there is no tokenizer at .*tokenizer.json; give 'byte'"),
    ],
)
def test_what_a_folder_without_tokenizer_json_lacks_is_said(files: list[str], missing: str, tmp_path: Path) -> None:
    for file in files:
        (tmp_path / file).write_text("{}")
    with pytest.raises(DataError, match=missing):
        load_tokenizer(tmp_path)


def test_an_end_that_only_the_config_names_gets_an_id_of_its_own_and_is_not_another(tmp_path: Path) -> None:
    kinds()["llama 2"]().write(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"})
    )
    found = load_tokenizer(tmp_path, special=True)
    assert isinstance(found, JsonTokenizer)
    assert found.encode("<|im_start|><|im_end|>") == [found.start_id, found.eos_id]
    assert found.vocab_size == found.eos_id + 1 or found.vocab_size == (found.start_id or 0) + 1
    with pytest.raises(DataError, match=r"has no token '<gone>', which its files name as eos_token"):
        JsonTokenizer(small_bpe().to_str(), "here", config={"eos_token": "<gone>"})


def panicking(when: str) -> str:
    """Of a normalizer that the library does not look at closely enough, when it reads or when it uses it."""
    charsmap = b"\xff\xff\xff\xff" if when == "reading" else b"\x04\x00\x00\x00abcd"
    step = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap).decode()}
    return json.dumps({**json.loads(small_bpe().to_str()), "normalizer": step})


@pytest.mark.parametrize("when", ["reading", "using"])
def test_a_panic_of_the_library_is_one_sentence_and_nothing_else(
    when: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tokenizer.json").write_text(panicking(when))
    with pytest.raises(DataError, match="is no tokenizer that can be used"):
        load_tokenizer(tmp_path).encode("a whale")
    assert capfd.readouterr().err == ""
    os.write(2, b"still there")
    assert capfd.readouterr().err == "still there"


@pytest.mark.parametrize("named_in", ["tokenizer.json", "tokenizer_config.json"])
def test_a_token_of_which_the_normalizer_leaves_nothing_is_refused(named_in: str, tmp_path: Path) -> None:
    """The library would find it between any two letters, and never end."""
    token = AddedToken("\n", normalized=True)
    library = small_bpe(added=[token] if named_in == "tokenizer.json" else [])
    strips = {"type": "Strip", "strip_left": True, "strip_right": True}
    spec = {**json.loads(library.to_str()), "normalizer": strips}
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    if named_in == "tokenizer_config.json":
        flags = dict.fromkeys(("lstrip", "rstrip", "single_word", "special"), False) | {"normalized": True}
        said = {"added_tokens_decoder": {str(library.get_vocab_size()): {"content": "\n", **flags}}}
        (tmp_path / named_in).write_text(json.dumps(said))
    with pytest.raises(DataError, match=r"the normalizer leaves nothing of the added token '\\n'"):
        load_tokenizer(tmp_path)


def test_nothing_is_left_of_a_token_only_where_a_text_goes_on() -> None:
    """What is put before a beginning keeps it from being nothing there."""
    library = small_bpe("metaspace", added=[AddedToken("\n", normalized=True)])
    steps = [{"type": "Prepend", "prepend": "▁"}, {"type": "Strip", "strip_left": True, "strip_right": True}]
    spec = {**json.loads(library.to_str()), "normalizer": {"type": "Sequence", "normalizers": steps}}
    with pytest.raises(DataError, match="the normalizer leaves nothing of the added token"):
        _ = JsonTokenizer(json.dumps(spec), "here", piece_chars=10)._inner


def test_the_command_ends_with_78_at_a_panic(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(panicking("using"))
    corpus = write_jsonl(tmp_path / "a.jsonl", ["a whale"])
    run = shoal("data", "prepare", corpus, "--tokenizer", tmp_path, "--out", tmp_path / "out")
    said = run.communicate()[1]
    assert run.returncode == 78
    assert said.count("\n") == 1
    assert "is no tokenizer that can be used" in said


def test_a_panic_while_learning_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the process that learns; no text that makes the library panic there is known."""
    import io
    import sys
    from dataclasses import asdict

    from shoal.data.prepare import tokenizer_train
    from shoal.data.prepare.child_errors import to_error

    def panic(lesson: tokenizer_train.Lesson) -> dict[str, Any]:
        Tokenizer.from_str(panicking("reading"))
        raise AssertionError("it does not panic any more")

    monkeypatch.setattr(tokenizer_train, "learn", panic)
    lesson = tokenizer_train.Lesson(["x"], 300)
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(asdict(lesson))))
    monkeypatch.setattr(sys, "stdout", out := io.StringIO())
    tokenizer_train.main()
    error = to_error(json.loads(out.getvalue()))
    assert isinstance(error, DataError)
    assert "gave up on the text" in str(error)


@pytest.mark.parametrize("pattern", ["(a+)+$", r"(?:\s*x*)*", "((a|b)*c)*", "(a{2,})+", "(?:(?:x+)y)*"])
def test_a_pattern_that_may_take_for_ever_is_refused(pattern: str) -> None:
    spec = json.loads(small_bpe().to_str())
    spec["pre_tokenizer"] = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    with pytest.raises(DataError, match=r"pre_tokenizer: pattern: .* repeats a group that repeats"):
        JsonTokenizer(json.dumps(spec), "here")


@pytest.mark.parametrize("pattern", [GPT2, GPT4, QWEN2, O200K, r"\(a+\)+", "[(a+)]+", r"\p{N}{1,3}", "(?:ab|c+)?d+"])
def test_patterns_that_are_in_use_are_not(pattern: str) -> None:
    assert endless(pattern) is None


def test_sizes_are_looked_at_before_the_library_sees_them() -> None:
    good = json.loads(small_bpe().to_str())
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    split = {"type": "Split", "pattern": {"Regex": "x" * (MOST_PATTERN_CHARS + 1)}, "behavior": "Isolated"}
    for change, words in (
        ({"normalizer": {"type": "Sequence", "normalizers": [step] * 60}}, "more than 4,096 times as long"),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 300}}, "no list of at most 256"),
        ({"pre_tokenizer": split}, "pattern: 'x+' where a text of at most 16384 characters belongs"),
        ({"model": {**good["model"], "vocab": {"x" * 20_000: 0}}}, "model: vocab: a token that is no text"),
        ({"model": {**good["model"], "vocab": 5}}, "model: vocab: 5 where an object belongs"),
        ({"model": []}, "model: a list where an object belongs"),
        ({"added_tokens": [5]}, "added_tokens: 5 where an object belongs"),
        ({"normalizer": 5}, "normalizer: something else than a step"),
    ):
        with pytest.raises(DataError, match=words):
            JsonTokenizer(json.dumps({**good, **change}), "here")


def test_a_text_that_cannot_be_cut_is_encoded_whole_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_module, "MAX_STRETCH_CHARS", 1000)
    tokenizer = JsonTokenizer(small_bpe("llama3").to_str(), "here", piece_chars=100)
    assert tokenizer.encode("a" * 1000) == tokenizer.encode_batch(["a" * 1000])[0].tolist()
    assert len(tokenizer.encode("whale " * 1000)) >= 1000  # this one is cut
    with pytest.raises(DataError, match="1,001 characters in a row within which here cannot be shown to cut"):
        tokenizer.encode("a" * 1001)


def test_files_that_are_no_files_are_not_waited_for(tmp_path: Path) -> None:
    small_bpe().save(str(tmp_path / "tokenizer.json"))
    os.mkfifo(tmp_path / "tokenizer_config.json")
    with pytest.raises(DataError, match=r"tokenizer_config.json.*is a FIFO"):
        load_tokenizer(tmp_path)
    os.mkfifo(tmp_path / "own.json")
    with pytest.raises(DataError, match=r"own.json.*FIFO"):
        load_tokenizer(tmp_path / "own.json")

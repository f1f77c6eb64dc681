"""Starts and ends of documents: what is learnt from what, whichever tokenizer, and that text stays text."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, processors

from shoal.cli.main import main
from shoal.data.index import INDEX_FILE
from shoal.data.prepare.data_set import Options, prepare
from shoal.data.prepare.units import Reading
from shoal.data.shards import ShardWriter, TokenShards, write_index
from shoal.data.sources import refuse_mixed_tokens
from shoal.data.starts import Frame, begun
from shoal.data.tokenizer import JsonTokenizer, load_tokenizer, tokenizer_of
from shoal.data.windows import NO_TARGET, Windows
from shoal.errors import DataError
from shoal.guard.begin import data_identity
from shoal.spec import load
from tests.data.preparing import small_bpe, write_jsonl

END = 256  # and start: the byte tokenizer's
TEXTS = ["ab", "c", "defghijklm", "n", "opq"]


def prepared(folder: Path, texts: list[str], **options: Any) -> TokenShards:
    write_jsonl(folder / "in.jsonl", texts)
    prepare([str(folder / "in.jsonl")], folder / "out", Options(quiet=True, workers=1, **options))
    return TokenShards.open(folder / "out")


def learnt(data: TokenShards, length: int, mask_documents: bool = True) -> list[tuple[int, ...]]:
    """For every target of every window: the input it stands at, and all that its attention sees before it."""
    windows = Windows([data], length, mask_documents)
    count = windows.sizes[0]
    batch = windows.batch(np.zeros(count, np.int64), np.arange(count))
    found = []
    for row in range(count):
        for i in range(length):
            if batch.targets[row, i] != NO_TARGET:
                mine = np.flatnonzero(batch.documents[row, : i + 1] == batch.documents[row, i])
                found.append((*batch.tokens[row, mine].tolist(), int(batch.targets[row, i])))
    return found


def test_every_token_of_a_document_is_learnt_from_its_start_on_and_no_start_is_a_target(tmp_path: Path) -> None:
    data = prepared(tmp_path, TEXTS)
    stream = [token for text in TEXTS for token in (END, *text.encode(), END)]
    assert data.read(0, data.tokens)[0].tolist() == stream
    whole = learnt(data, data.tokens - 1)  # one window: nothing is cut
    assert whole == [
        (END, *bytes_[:n], (*bytes_, END)[n])
        for bytes_ in (text.encode() for text in TEXTS)
        for n in range(len(bytes_) + 1)
    ]


def test_in_windows_of_any_length_each_token_but_the_starts_is_a_target_once(tmp_path: Path) -> None:
    data = prepared(tmp_path, TEXTS)
    stream, ends, _ = data.read(0, data.tokens)
    for length, mask_documents in product(range(1, data.tokens), (True, False)):
        last = (data.tokens - 1) // length * length  # what is left of the stream is in no window
        wanted = [int(stream[i]) for i in range(1, last + 1) if i not in ends]
        assert [seen[-1] for seen in learnt(data, length, mask_documents)] == wanted


def test_answers_are_learnt_from_start_and_prompt_and_without_a_prompt_from_the_start(tmp_path: Path) -> None:
    rows = [{"prompt": "2+2=", "text": "4"}, {"prompt": "", "text": "ab"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    reading = Reading(prompt_field="prompt")
    prepare([str(tmp_path / "a.jsonl")], tmp_path / "out", Options(reading=reading, quiet=True, workers=1))
    data = TokenShards.open(tmp_path / "out")
    data.verify()
    assert learnt(data, data.tokens - 1) == [
        (END, *b"2+2=", ord("4")),
        (END, *b"2+2=4", END),
        (END, ord("a")),
        (END, *b"ab"),
        (END, *b"ab", END),
    ]


def library(template: str | None = None) -> Tokenizer:
    """A BPE with the special tokens of several families; `template` is laid over every text, as in Llama 3."""
    found = small_bpe()
    found.add_special_tokens(["<|begin_of_text|>", "<s>", "<bos>", "<x>"])
    if template is not None:
        named = [(t, found.token_to_id(t)) for t in template.split() if not t.startswith("$")]
        own = processors.TemplateProcessing(single=template, special_tokens=named)
        found.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), own])
    return found


@pytest.mark.parametrize(
    ("template", "config", "start"),
    [
        ("<|begin_of_text|> $A", {"bos_token": "<|begin_of_text|>"}, "<|begin_of_text|>"),  # Llama 3
        ("<bos> $A", None, "<bos>"),  # Gemma, the file alone
        ("<s> $A <|endoftext|>", {"bos_token": {"content": "<s>"}}, "<s>"),  # Llama 2 with add_eos_token
        ("<x> $A", {}, "<x>"),  # a template counts more than what is named
        (None, {"bos_token": "<s>", "add_bos_token": True}, "<s>"),  # DeepSeek: transformers makes the template
        ("<s> $A", {"bos_token": "<s>", "add_bos_token": False}, "<|endoftext|>"),  # and takes it away
        (None, {"bos_token": None, "add_bos_token": False}, "<|endoftext|>"),  # Qwen
        (None, {"bos_token": "<bos>"}, "<bos>"),
        (None, None, "<|begin_of_text|>"),  # nothing but the vocabulary: by its name
        ("$A <|endoftext|>", {}, "<|endoftext|>"),
    ],
)
def test_documents_start_as_the_tokenizers_own_template_says_and_once(
    tmp_path: Path, template: str | None, config: dict[str, Any] | None, start: str
) -> None:
    own = library(template)
    own.save(str(tmp_path / "tokenizer.json"))
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    data = prepared(tmp_path, ["a whale", "the sea"], tokenizer=str(tmp_path))
    data.verify()
    first, end = own.token_to_id(start), own.token_to_id("<|endoftext|>")
    assert (data.start_id, data.eos_id) == (first, end)
    words = [own.encode(text, add_special_tokens=False).ids for text in ("a whale", "the sea")]
    assert data.read(0, data.tokens)[0].tolist() == [first, *words[0], end, first, *words[1], end]
    assert load_tokenizer(tmp_path / "out").start_id == tokenizer_of(data).start_id == first


def test_a_start_can_be_named_and_marks_that_a_text_brings_along_are_not_doubled(tmp_path: Path) -> None:
    library().save(str(tmp_path / "tokenizer.json"))
    texts = ["<s>the sea<|endoftext|>", "the sea", "<s>", "<|endoftext|>"]
    data = prepared(tmp_path, texts, tokenizer=str(tmp_path), start="<s>", special=True)
    start, end, sea = data.start_id, data.eos_id, load_tokenizer(tmp_path).encode("the sea")
    assert start == library().token_to_id("<s>")
    whole = [start, *sea, end]
    assert data.read(0, data.tokens)[0].tolist() == [*whole, *whole, start, end, start, end]
    assert begun([start, *sea], start) == [start, *sea] == begun(sea, start)
    frame = Frame(start, end, np.uint16)
    for prompt, text in (([], [start, *sea]), ([start], sea), ([], sea)):
        pieces = [[np.array(part, np.uint16)] if part else [] for part in (prompt, text)]
        whole, size, context = frame.around(*pieces)
        assert (np.concatenate(whole).tolist(), size, context) == ([start, *sea, end], len(sea) + 2, 1)
    with pytest.raises(DataError, match="has no token '<nowhere>', which --start names"):
        load_tokenizer(tmp_path, start="<nowhere>")
    library("<s> <x> $A").save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match=r"puts 2 tokens before every text .* with --start, or --start none"):
        load_tokenizer(tmp_path)
    assert load_tokenizer(tmp_path, start="<x>").start_id == library().token_to_id("<x>")
    assert load_tokenizer(tmp_path, start="none").start_id is None


def test_a_vocabulary_of_whole_words_starts_documents_too(tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"<eos>": 0, "whale": 1}, unk_token="<unk>"))  # raises at other words
    words.save(str(tmp_path / "tokenizer.json"))
    data = prepared(tmp_path, ["whale"], tokenizer=str(tmp_path))
    assert data.read(0, data.tokens)[0].tolist() == [0, 1, 0]


def test_a_special_token_in_a_text_is_text_unless_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_bpe().save(str(tmp_path / "tokenizer.json"))
    write_jsonl(tmp_path / "in.jsonl", ["to end<|endoftext|> it"])
    arguments = ["data", "prepare", str(tmp_path / "in.jsonl"), "--tokenizer", str(tmp_path), "--workers", "1"]
    for extra, inside in (([], 0), (["--special"], 1)):
        out = tmp_path / f"out{inside}"
        assert main([*arguments, "--out", str(out), *extra]) == 0
        assert "documents start with 0 and end with 0" in capsys.readouterr().out
        data = TokenShards.open(out)
        ids = data.read(0, data.tokens)[0].tolist()
        assert ids[1:-1].count(data.eos_id) == inside
        assert load_tokenizer(out).decode(ids) == ("to end it" if inside else "to end<|endoftext|> it")


def unigram() -> str:
    """A Unigram in which the names of special tokens are pieces like any other, as in T5: the likeliest ones."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), *((c, -5.0) for c in "<>/ s"), ("a", -2.0)]
    made = Tokenizer(models.Unigram(pieces, 0, False))
    made.add_special_tokens(["<unk>", "</s>"])
    return made.to_str()


def word_pieces() -> str:
    made = small_bpe()
    spec = json.loads(made.to_str())
    spec["model"]["ignore_merges"] = True  # as in Llama 3: a whole word of the vocabulary is taken as it is
    spec["pre_tokenizer"] = None
    return json.dumps(spec)


def merged() -> str:
    """A BPE whose merges make the name of a special token."""
    spec = json.loads(small_bpe().to_str())
    spec["added_tokens"].append({**spec["added_tokens"][0], "id": spec["model"]["vocab"]["the"], "content": "the"})
    return json.dumps(spec)


@pytest.mark.parametrize(
    ("content", "name"), [(unigram(), "</s>"), (word_pieces(), "<|endoftext|>"), (merged(), "the")]
)
def test_no_vocabulary_makes_a_special_token_of_plain_text(content: str, name: str) -> None:
    end = Tokenizer.from_str(content).token_to_id(name)
    plain, special = (JsonTokenizer(content, "here", end, special=asked) for asked in (False, True))
    for text in (name, f"a{name}", f"a {name}s"):
        assert end in special.encode(text)
        assert end not in plain.encode(text)
        assert end not in plain.encode_batch([text])[0].tolist()
        assert plain.decode(plain.encode(text)).replace(" ", "") == text.replace(" ", "")
    assert plain.encode("a sea") == special.encode("a sea")


def old_data(folder: Path, documents: list[list[int]]) -> TokenShards:
    """As it was prepared before there was a rule: no start tokens, nothing about them in the index."""
    folder.mkdir(parents=True)
    writer = ShardWriter(folder, "shard-00000", "uint16")
    for document in documents:
        writer.add(document)
    write_index(folder, [writer.close()], vocab_size=257, eos_id=END, tokenizer="byte")
    index = json.loads((folder / INDEX_FILE).read_text())
    del index["start_id"]
    (folder / INDEX_FILE).write_text(json.dumps(index))
    return TokenShards.open(folder)


def test_data_prepared_before_is_read_as_ever_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = old_data(tmp_path / "old", [[*b"ab", END], [*b"cd", END]])
    old.verify()
    assert old.start_id is load_tokenizer(tmp_path / "old").start_id is tokenizer_of(old).start_id is None
    assert old.fingerprint == "ecc339ae5de1d888eb1d303cca218820"  # as Shoal computed it then
    assert learnt(old, old.tokens - 1) == [(97, 98), (97, 98, END), (99, 100), (99, 100, END)]
    assert main(["data", "info", str(tmp_path / "old")]) == 0
    assert "documents have no start token and end with 256" in capsys.readouterr().out
    new = prepared(tmp_path, TEXTS)
    file = tmp_path / "run.yaml"
    for data, said in ((old, "documents: no start token in data.train"), (new, "documents: start with token 256")):
        file.write_text(
            f"name: a\nmodel: {{preset: tiny}}\ndata: {{train: {data.where}, seq_len: 2}}\ntrain: {{steps: 1}}\n"
        )
        assert main(["show", str(file)]) == 0
        assert said in capsys.readouterr().out
        assert data_identity(load(file).run)["document_starts"] == {data.where: data.start_id}


def test_old_and_new_data_in_one_mixture_are_refused_with_two_ways_out(tmp_path: Path) -> None:
    old, new = old_data(tmp_path / "old", [[*b"ab", END]]), prepared(tmp_path, TEXTS)
    with pytest.raises(
        DataError, match=r"no start token .* start with 256 .* again, or the newer one with --start none"
    ):
        refuse_mixed_tokens([old, new])
    (tmp_path / "b").mkdir()
    refuse_mixed_tokens([old, prepared(tmp_path / "b", TEXTS, start="none")])


@pytest.mark.parametrize("document", [[*b"ab", END], [*b"abcdef", END, END]])
def test_verify_finds_a_document_without_its_start(tmp_path: Path, document: list[int]) -> None:
    writer = ShardWriter(tmp_path, "shard-00000", "uint16")
    writer.add([END, *b"ok", END])
    writer.add(document)
    write_index(tmp_path, [writer.close()], vocab_size=257, eos_id=END, start_id=END, tokenizer="byte")
    with pytest.raises(DataError, match="does not start with 256 and end with 256"):
        TokenShards.open(tmp_path).verify()


@pytest.mark.parametrize("start_id", [257, -1, "256", 1.5])
def test_an_index_with_an_impossible_start_is_refused(tmp_path: Path, start_id: object) -> None:
    data = prepared(tmp_path, TEXTS)
    file = tmp_path / "out" / INDEX_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | {"start_id": start_id}))
    with pytest.raises(DataError, match=r"start_id|start-of-document id"):
        TokenShards.open(data.where)


def test_a_folder_that_an_older_shoal_prepared_is_not_replaced(tmp_path: Path) -> None:
    prepared(tmp_path, TEXTS)
    plan = tmp_path / "out" / ".prepare" / "plan.json"
    plan.write_text(json.dumps({"digest": "of then", "version": 1}))
    with pytest.raises(DataError, match=r"an older Shoal made by other rules; it can be trained on as it is"):
        prepared(tmp_path, TEXTS)
    assert prepared(tmp_path, TEXTS, overwrite=True).start_id == END

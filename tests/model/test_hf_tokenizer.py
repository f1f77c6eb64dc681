"""AutoTokenizer opens what Shoal exports, and says what Shoal's own tokenizer says."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

import tests.model.families  # noqa: F401  # sets transformers offline before it is imported
from shoal.cli.main import main
from shoal.data.tokenizer import Tokenizer, load_tokenizer
from shoal.errors import DataError
from shoal.model.decoder import Decoder
from shoal.model.hf import save_folder
from shoal.model.hf_tokenizer import save_tokenizer
from shoal.spec.model import Model
from shoal.spec.shape import Shape, shape_of
from tests.data.preparing import write_jsonl
from tests.data.tokenizer_kinds import kinds, texts_to_try

TEXT = "Call me Ishmael. Some years ago — never mind how long\tprecisely —\n\nnaïve café, 鯨, 🐋  two  spaces, \x00\x7f"
SHAPE = shape_of(Model(vocab_size=320, dim=16, layers=1, heads=2, ffn_dim=24, max_seq_len=99))


def export(folder: Path, tokenizer: Tokenizer | None = None, like: Path | None = None, shape: Shape = SHAPE) -> None:
    model = Decoder(shape)
    model.init_weights(0)
    save_folder(folder, shape, dict(model.named_parameters()), tokenizer, like)


def trained_bpe(folder: Path) -> Tokenizer:
    (folder / "text.txt").write_text(TEXT * 3)
    out = str(folder / "tokenizer.json")
    assert main(["data", "tokenizer", str(folder / "text.txt"), "--vocab-size", "300", "--out", out]) == 0
    return load_tokenizer(out)


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_the_exported_tokenizer_gives_the_same_ids_and_ends_alike(kind: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    ours = load_tokenizer("byte") if kind == "byte" else trained_bpe(tmp_path)
    export(tmp_path / "hf", ours)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "hf")
    ids = theirs(TEXT, add_special_tokens=False).input_ids
    assert ids == ours.encode(TEXT)
    assert theirs.decode(ids) == TEXT == ours.decode(ids)
    assert theirs.eos_token_id == ours.eos_id
    assert theirs(TEXT + theirs.eos_token, add_special_tokens=False).input_ids == [*ids, ours.eos_id]
    assert theirs.decode([*ids, ours.eos_id], skip_special_tokens=True) == TEXT
    assert theirs.model_max_length == 99
    config = AutoConfig.from_pretrained(tmp_path / "hf")
    assert (config.eos_token_id, config.bos_token_id) == (ours.eos_id, ours.start_id)
    assert theirs(TEXT).input_ids == [ours.start_id, *ids]  # as a document of the training data began
    assert load_tokenizer(tmp_path / "hf").start_id == ours.start_id


def test_a_model_that_never_saw_a_start_token_is_exported_without_one(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    export(tmp_path / "hf", load_tokenizer("byte", start="none"))
    assert AutoTokenizer.from_pretrained(tmp_path / "hf")("ab").input_ids == [97, 98]
    assert AutoConfig.from_pretrained(tmp_path / "hf").bos_token_id is None


def test_every_byte_has_its_own_id_in_the_exported_byte_tokenizer(tmp_path: Path) -> None:
    export(tmp_path / "hf", load_tokenizer("byte"))
    from tokenizers import Tokenizer as Library

    library = Library.from_file(str(tmp_path / "hf" / "tokenizer.json"))
    every_character_of_two_bytes = "".join(map(chr, range(0x800)))
    ids = library.encode(every_character_of_two_bytes, add_special_tokens=False).ids
    assert ids == list(every_character_of_two_bytes.encode())
    assert library.get_vocab_size() == 257
    assert load_tokenizer(tmp_path / "hf").eos_id == 256  # Shoal reads its own export, too


def test_a_fine_tuned_model_keeps_the_text_files_and_token_ids_it_came_with(tmp_path: Path) -> None:
    base = tmp_path / "base"
    export(base, load_tokenizer("byte"))
    config = json.loads((base / "config.json").read_text()) | {"eos_token_id": [256, 7], "bos_token_id": 3}
    (base / "config.json").write_text(json.dumps(config))
    (base / "chat_template.jinja").write_text("{{ messages }}")
    (base / "generation_config.json").write_text('{"eos_token_id": [256, 7]}')
    (base / "notes.txt").write_text("not about text")
    export(tmp_path / "tuned", like=base)
    tuned = {p.name: p for p in (tmp_path / "tuned").iterdir()}
    for name in ("chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert tuned[name].read_bytes() == (base / name).read_bytes()
    assert "notes.txt" not in tuned
    said = json.loads(tuned["config.json"].read_text())
    assert (said["eos_token_id"], said["bos_token_id"]) == ([256, 7], 3)


def test_a_template_of_the_tokenizers_own_is_carried_as_it_is_and_another_start_replaces_it(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    trained_bpe(tmp_path)
    own = json.loads((tmp_path / "tokenizer.json").read_text())
    for start, carried in ((None, True), ("<|reserved_0|>", False)):
        ours = load_tokenizer(tmp_path / "tokenizer.json", start=start)
        export(tmp_path / f"hf{start is None}", ours)
        written = json.loads((tmp_path / f"hf{start is None}" / "tokenizer.json").read_text())
        assert (written["post_processor"] == own["post_processor"]) is carried
        theirs = AutoTokenizer.from_pretrained(tmp_path / f"hf{start is None}")
        assert theirs(TEXT).input_ids == [ours.start_id, *ours.encode(TEXT)]


@pytest.mark.parametrize(
    "name", ["all the files", "llama 2 legacy", "qwen2", "unigram, t5 style", "tokens of the config"]
)
def test_a_tokenizer_is_the_same_after_a_data_set_and_an_export(name: str, tmp_path: Path) -> None:
    """From a stranger's folder into a data set, from there into an exported model."""
    from transformers import AutoTokenizer

    from shoal.data.prepare.data_set import Options, prepare

    folder = kinds()[name]().write(tmp_path / "theirs")
    corpus = write_jsonl(tmp_path / "a.jsonl", ["a whale", "the sea"])
    prepare([str(corpus)], tmp_path / "data", Options(tokenizer=str(folder), quiet=True))
    before = AutoTokenizer.from_pretrained(folder)
    export(tmp_path / "ours", load_tokenizer(tmp_path / "data"))
    after = AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert after.get_vocab() == before.get_vocab()
    for text in texts_to_try().values():
        ids = before(text, add_special_tokens=False).input_ids
        assert after(text, add_special_tokens=False).input_ids == ids
        assert after.decode(ids, skip_special_tokens=True) == before.decode(ids, skip_special_tokens=True)
    assert after.eos_token_id == before.eos_token_id


def test_a_fine_tuned_model_keeps_every_file_that_its_tokenizer_is_made_of(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    base = tmp_path / "base"
    export(base, load_tokenizer("byte"))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (base / file).unlink()
    kinds()["gpt2 of vocab and merges"]().write(base)
    for file in ("special_tokens_map.json", "added_tokens.json"):
        (base / file).write_text('{"<|later|>": 500}' if "added" in file else '{"pad_token": "<|pad|>"}')
    export(tmp_path / "tuned", like=base)
    before, after = (AutoTokenizer.from_pretrained(folder) for folder in (base, tmp_path / "tuned"))
    assert after.get_vocab() == before.get_vocab()
    assert "<|later|>" in after.get_vocab()
    assert [before(t).input_ids for t in texts_to_try().values()] == [
        after(t).input_ids for t in texts_to_try().values()
    ]


def save(folder: Path, tokenizer: Tokenizer, family: str) -> Path:
    """The files about text of an exported model of that family."""
    folder.mkdir()
    config = save_tokenizer(folder, dataclasses.replace(SHAPE, family=family), tokenizer, None)
    (folder / "config.json").write_text(json.dumps({**config, "model_type": family}))
    return folder


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "mixtral", "qwen3_moe", "dots1"])
def test_every_family_is_exported_with_the_tokenizer_it_was_trained_with(family: str, tmp_path: Path) -> None:
    """For Qwen 2 transformers would make another one of the same vocabulary."""
    from transformers import AutoTokenizer

    ours = load_tokenizer(kinds()["bytes as they are"]().write(tmp_path / "theirs"))
    theirs = AutoTokenizer.from_pretrained(save(tmp_path / "hf", ours, family))
    for text in texts_to_try().values():
        assert theirs(text, add_special_tokens=False, split_special_tokens=True).input_ids == ours.encode(text)


def test_a_tokenizer_that_transformers_would_not_take_as_it_is_is_not_exported(tmp_path: Path) -> None:
    ours = load_tokenizer(kinds()["unigram, t5 style"]().write(tmp_path / "t5"))
    with pytest.raises(DataError, match="makes the tokenizer of every qwen2 model by rules of its own"):
        save(tmp_path / "hf", ours, "qwen2")

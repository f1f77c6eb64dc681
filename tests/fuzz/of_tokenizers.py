"""Tokenizers of others: folders by class, as AutoTokenizer takes them, and the files beside data sets."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.json_values import encoded, mutated
from tests.fuzz.of_data import emptied
from tests.fuzz.reader import Finding, Folder, Target, reader
from tests.fuzz.samples import one_file_of, texts_of

TEXTS = ("one fish two  fish", "", "é\n<|im_start|>x", "\x00", "aaaa bbbb " * 20, "abc, abc. fish\n\n  x12é" * 8)
PIECE = 24  # characters: what is longer is cut, as long texts are


def tokenizer_files() -> list[Folder]:
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    letters = [chr(i) for i in range(97, 107)] + ["Ġ", "Ċ", " ", "▁"]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{c: i + 3 for i, c in enumerate(letters)}}
    merged = {**vocab, "ab": len(vocab), "abc": len(vocab) + 1}
    byte = Tokenizer(
        models.BPE(
            {**{c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, "Ġa": 256}, [("Ġ", "a")]
        )
    )
    byte.pre_tokenizer, byte.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    byte.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    bpe = Tokenizer(models.BPE(merged, [("a", "b"), ("ab", "c")], unk_token="<unk>", fuse_unk=True))
    bpe.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(" ", "▁")])
    bpe.decoder = decoders.Replace("▁", " ")
    bpe.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 1)])
    bpe.add_special_tokens(["<s>", "</s>"])
    word = Tokenizer(models.WordPiece(vocab, unk_token="<unk>"))
    word.pre_tokenizer, word.normalizer = pre_tokenizers.BertPreTokenizer(), normalizers.BertNormalizer()
    uni = Tokenizer(models.Unigram([(t, -float(i)) for t, i in vocab.items()], 0, False))
    uni.pre_tokenizer, uni.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    uni.add_tokens(["fish"])
    level = Tokenizer(models.WordLevel(vocab, "<unk>"))
    level.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.Split("x", "isolated")])
    config = {
        "eos_token": "</s>",
        "bos_token": "<s>",
        "add_bos_token": True,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": {"2": {"content": "</s>", "special": True, "lstrip": False, "normalized": False}},
        "model_max_length": 2048,
        "chat_template": "{{ messages }}",
        "add_prefix_space": False,
    }
    beside = {
        "tokenizer_config.json": json.dumps(config).encode(),
        "special_tokens_map.json": json.dumps({"eos_token": "</s>", "bos_token": {"content": "<s>"}}).encode(),
        "added_tokens.json": json.dumps({"<|im_start|>": 400}).encode(),
    }
    made = [t.to_str().encode() for t in (byte, bpe, word, uni, level)]
    alone = [Folder({"tokenizer.json": one, **(beside if i else {})}) for i, one in enumerate(made)]

    def of_class(name: str, files: dict[str, bytes], **more: Any) -> Folder:
        said = {"tokenizer_class": name, **more}
        return Folder({**files, "tokenizer_config.json": json.dumps(said).encode()})

    model = json.loads(made[0])["model"]
    merges = "#version: 0.2\n" + "\n".join(" ".join(pair) for pair in model["merges"])
    bert = [*("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"), *letters[:10]]
    gpt2 = {"vocab.json": json.dumps({**model["vocab"], "<|endoftext|>": 257}).encode(), "merges.txt": merges.encode()}
    marks = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return [
        *alone,
        of_class("GPT2Tokenizer", gpt2, add_prefix_space=False),
        of_class("GPT2Tokenizer", {"tokenizer.json": made[0]}, add_prefix_space=True),
        of_class("Qwen2Tokenizer", {"tokenizer.json": made[0]}),
        of_class("LlamaTokenizer", {"tokenizer.json": made[1]}, **marks),
        of_class("BertTokenizer", {"vocab.txt": "\n".join(bert).encode()}, do_lower_case=True, eos_token="[SEP]"),
        of_class("PreTrainedTokenizerFast", {"tokenizer.json": made[4]}, clean_up_tokenization_spaces=True, **marks),
    ]


@reader(
    "tokenizers",
    "data.tokenizer",
    "data.word_ids",
    "data.cuts",
    "data.starts",
    "data.plain_text",
    "data.tokenizer_folder",
    "data.tokenizer_rebuild",
    "model.hf_tokenizer",
    quick=120,
    share=15,
)
def tokenizers(folder: Path) -> Target:
    from shoal.data.tokenizer import JsonTokenizer, load_tokenizer
    from shoal.errors import ShoalError

    good = tokenizer_files()

    def generate(rng: Random) -> Folder:
        one = rng.choice(good)
        if rng.random() < 0.1:  # as it is: the texts, and how long ones are cut
            return one
        # The byte-level vocabulary is large: what stands around it is changed more often.
        if rng.random() < 0.5 and "tokenizer.json" in one:
            spec = json.loads(one["tokenizer.json"])
            for part in rng.sample(
                ("model", "pre_tokenizer", "decoder", "normalizer", "post_processor", "added_tokens"), 1
            ):
                if isinstance(spec[part], dict) and rng.random() < 0.6:
                    small = {k: v for k, v in spec[part].items() if k not in ("vocab", "merges")}
                    spec[part] = {**spec[part], **(m if isinstance(m := mutated(rng, small), dict) else {})}
                else:
                    spec[part] = mutated(rng, spec[part])
            return Folder({**one, "tokenizer.json": encoded(spec)})
        return one_file_of(one, [name for name in one if name.endswith(".json")], rng)

    def read(case: Folder) -> None:
        where = case.write(emptied(folder / "one"))
        for special in (False, True):
            tokenizer = load_tokenizer(where, eos=rng_eos(case), special=special)
            whole = [list(map(int, ids)) for ids in tokenizer.encode_batch(TEXTS)]
            if isinstance(tokenizer, JsonTokenizer):
                tokenizer._piece_chars = PIECE
                if whole != [list(map(int, ids)) for ids in tokenizer.encode_batch(TEXTS)]:
                    raise Finding("other ids where a long text is cut")
            for ids in (*map(tokenizer.encode, TEXTS), *whole):
                if ids and not 0 <= min(ids) <= max(ids) < tokenizer.vocab_size:
                    raise Finding("ids beyond the vocabulary")
                tokenizer.decode(ids).encode("utf-8", "surrogatepass")
                for token in ids[:3]:
                    tokenizer.spelled(token)
            if not 0 <= tokenizer.eos_id < tokenizer.vocab_size:
                raise Finding("an end token beyond the vocabulary")
            tokenizer.save(folder)

    return Target(generate, read, (ShoalError,))


@reader("same-tokenizers", "data.sources", quick=150, share=40)
def same_tokenizers(folder: Path) -> Target:
    """Whether two data sets have one tokenizer, asked of the files beside them."""
    from types import SimpleNamespace

    from shoal.data.sources import refuse_mixed_tokens
    from shoal.errors import ShoalError

    good = json.loads(tokenizer_files()[1]["tokenizer.json"])

    def data(content: bytes) -> Any:
        about = {"vocab_size": 9, "eos_id": 2, "tokenizer": "tokenizer.json", "start_id": 1, "where": "data"}
        return SimpleNamespace(**about, folder=SimpleNamespace(read=lambda name, *_: content, where="data"))

    fixed = data(json.dumps(good).encode())
    return Target(texts_of(good), lambda case: refuse_mixed_tokens([data(case), fixed]), (ShoalError,))


def rng_eos(case: Folder) -> int | None:
    """Half of the cases name the end token themselves: what comes after it is reached then."""
    return 0 if len(case.get("tokenizer.json", b"")) % 2 else None

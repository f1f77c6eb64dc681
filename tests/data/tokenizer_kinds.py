"""Small tokenizers of every published kind, as folders that transformers' AutoTokenizer opens; and random ones."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from shoal.data.word_ids import GPT2, GPT4, QWEN2
from tests.data.preparing import make_texts

END = "<|endoftext|>"
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


@dataclass
class Kind:
    """A folder to be."""

    library: Tokenizer
    config: dict[str, Any] | None = None
    special: dict[str, Any] | None = None
    added: dict[str, int] | None = None
    model: dict[str, Any] | None = None
    other: dict[str, str] = field(default_factory=dict)
    has_file: bool = True
    eos: str | None = None
    """To be named to Shoal, where the folder names none."""

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        parts = {"tokenizer_config": self.config, "special_tokens_map": self.special, "added_tokens": self.added}
        for name, said in {**parts, "config": self.model}.items():
            if said is not None:
                (folder / f"{name}.json").write_text(json.dumps(said))
        for name, content in self.other.items():
            (folder / name).write_text(content)
        if self.has_file:
            self.library.save(str(folder / "tokenizer.json"))
        return folder


def texts_to_try(seed: int = 0) -> dict[str, str]:
    """Short, long (over a cut of 100 characters) and without blanks."""
    rng = random.Random(seed)
    words = " ".join(make_texts(8, seed, 30))
    letters = "".join(c for c in " ".join(make_texts(6, seed + 1)) if not c.isspace())
    return {
        "short": " The  whale's\t1851-2nd, “No!”\n\n e\u0301té naïve ﬁ 海は 🐳\u3000x",
        "marks": f"a {END}b <added> c<left>  d <right> e </s>f wholesale whole. <s>",
        "long": words,
        "lines": words.replace(". ", ".\n").replace(", ", ",\n\n"),
        "no blanks": letters,
        "one letter": "a" * 257,
        "digits": "".join(rng.choices("0123456789", k=331)),
        "blanks": "whale" + " " * 150 + "sea" + " \n" * 90 + "end ",
        "empty": "",
        "other script": "дом и мир, это было давно и неправда " * 8 + "अच्छा है यह " * 12 + "鯨は海にいる。" * 20,
    }


@cache
def _trained(model: str, pre: str, normal: str, extra: tuple[str, ...], vocab: int, alphabet: str) -> str:
    """By the names of the parts, as JSON: most kinds share a few."""
    library = Tokenizer(
        {
            "BPE": lambda: models.BPE(unk_token=extra[0] if "<unk>" in extra[:1] else None),
            "WordPiece": lambda: models.WordPiece(unk_token="[UNK]"),
            "WordLevel": lambda: models.WordLevel(unk_token="<unk>"),
            "Unigram": models.Unigram,
        }[model]()
    )
    library.pre_tokenizer = PRE[pre]()
    if normal:
        library.normalizer = NORMAL[normal]()
    common = {"special_tokens": list(extra), "show_progress": False}
    if model == "Unigram":
        trainer: Any = trainers.UnigramTrainer(vocab_size=vocab, unk_token="<unk>", **common)
    elif model == "WordLevel":
        trainer = trainers.WordLevelTrainer(vocab_size=vocab, **common)
    else:
        letters = pre_tokenizers.ByteLevel.alphabet() if alphabet == "bytes" else list(alphabet)
        kind = trainers.BpeTrainer if model == "BPE" else trainers.WordPieceTrainer
        trainer = kind(vocab_size=vocab, initial_alphabet=letters, **common)
    library.train_from_iterator(make_texts(60, seed=7), trainer)
    return library.to_str()


def trained(
    model: str, pre: str, normal: str = "", extra: Sequence[str] = (END,), vocab: int = 420, alphabet: str = ""
) -> Tokenizer:
    return Tokenizer.from_str(_trained(model, pre, normal, tuple(extra), vocab, alphabet))


def _split(pattern: str, prefix: bool = False) -> Any:
    letters = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), letters])


PRE: dict[str, Callable[[], Any]] = {
    "bytes": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "bytes prefix": lambda: pre_tokenizers.ByteLevel(add_prefix_space=True),
    "bytes whole": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    "digits bytes": lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(True), PRE["bytes"]()]),
    "gpt2": lambda: _split(GPT2),
    "gpt4": lambda: _split(GPT4),
    "gpt4 prefix": lambda: _split(GPT4, prefix=True),
    "qwen2": lambda: _split(QWEN2),
    "o200k": lambda: _split(O200K),
    "pairs of words": lambda: _split(r"\w+ \w+|\s+|\S+"),
    "numbers first": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"), _split(GPT4)]
    ),
    "metaspace": lambda: pre_tokenizers.Metaspace(prepend_scheme="always"),
    "metaspace first": lambda: pre_tokenizers.Metaspace(prepend_scheme="first"),
    "metaspace never": lambda: pre_tokenizers.Metaspace(prepend_scheme="never"),
    "metaspace whole": lambda: pre_tokenizers.Metaspace(prepend_scheme="first", split=False),
    "metaspace whole always": lambda: pre_tokenizers.Metaspace(prepend_scheme="always", split=False),
    "words metaspace": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")]
    ),
    "words metaspace first": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="first")]
    ),
    "bert": pre_tokenizers.BertPreTokenizer,
    "words": pre_tokenizers.Whitespace,
    "blanks": pre_tokenizers.WhitespaceSplit,
    "punctuation": lambda: pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()]),
    "letters": lambda: pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated"),
    "delimiter": lambda: pre_tokenizers.CharDelimiterSplit(" "),
    "gemma": lambda: pre_tokenizers.Split(" ", "merged_with_previous"),
    "after blanks": lambda: pre_tokenizers.Split(" ", "merged_with_next"),
    "scripts": lambda: pre_tokenizers.Sequence([pre_tokenizers.UnicodeScripts(), pre_tokenizers.WhitespaceSplit()]),
}
NORMAL: dict[str, Callable[[], Any]] = {
    "NFC": normalizers.NFC,
    "NFKC": normalizers.NFKC,
    "NFD": normalizers.NFD,
    "lower": lambda: normalizers.Sequence([normalizers.NFKD(), normalizers.Lowercase(), normalizers.StripAccents()]),
    "bert": lambda: normalizers.BertNormalizer(lowercase=True),
    "replace": lambda: normalizers.Replace(" ", "▁"),
    "prepend": lambda: normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
    "quotes": lambda: normalizers.Sequence(
        [normalizers.Replace("“", "``"), normalizers.Replace("''", '"'), normalizers.Replace(Regex(" {2,}"), " ")]
    ),
    "strip": lambda: normalizers.Sequence([normalizers.Strip(left=True, right=True), normalizers.NFC()]),
    "strip right": lambda: normalizers.Sequence([normalizers.NFKC(), normalizers.Strip(left=False, right=True)]),
}


def fallback(library: Tokenizer, unk: str = "<unk>", keep: bool = True) -> Tokenizer:
    """A BPE with byte fallback, as converted from SentencePiece; with `keep` its blank is a metaspace."""
    spec = json.loads(library.to_str())
    vocab = spec["model"]["vocab"]
    for token in BYTES:
        vocab.setdefault(token, len(vocab))
    spec["model"] |= {"byte_fallback": True, "fuse_unk": True, "unk_token": unk if unk in vocab else None}
    made = Tokenizer.from_str(json.dumps(spec))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if keep:
        steps.append(decoders.Strip(" ", 1, 0))
    made.decoder = decoders.Sequence(steps)
    return made


SPM = ("<unk>", "<s>", "</s>")
MARKS = [
    AddedToken("<added>"),
    AddedToken("<left>", lstrip=True),
    AddedToken("<right>", rstrip=True),
    AddedToken("whole", single_word=True),
]


def with_bytes(library: Tokenizer, template: str = "") -> Tokenizer:
    library.decoder = decoders.ByteLevel()
    if template:
        ids = [(t, library.token_to_id(t)) for t in dict.fromkeys(template.split()) if t != "$A"]
        library.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)
    return library


def with_marks(library: Tokenizer, marks: Sequence[AddedToken] = MARKS) -> Tokenizer:
    library.add_tokens(list(marks))
    return library


def kinds() -> dict[str, Callable[[], Kind]]:
    fast = {"tokenizer_class": "PreTrainedTokenizerFast"}
    named = {**fast, "eos_token": END}

    def bpe(pre: str = "bytes", normal: str = "", **more: Any) -> Tokenizer:
        return with_bytes(trained("BPE", pre, normal, alphabet="bytes", **more))

    def spm(pre: str = "metaspace whole", normal: str = "", keep: bool = True) -> Tokenizer:
        """Learned from words, as SentencePiece does, so that no merge goes over a blank."""
        library = trained("BPE", "metaspace", normal, SPM)
        library.pre_tokenizer = PRE[pre]()
        return fallback(library, keep=keep)

    def decoder_of(token: str, **flags: bool) -> dict[str, Any]:
        usual = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False) | {"special": True}
        return {"content": token, **usual, **flags}

    def vocab_files() -> Kind:
        model = json.loads(bpe().to_str())["model"]
        merges = "\n".join(" ".join(m) if isinstance(m, list) else m for m in model["merges"])
        other = {"vocab.json": json.dumps(model["vocab"]), "merges.txt": f"#version: 0.2\n{merges}\n"}
        return Kind(bpe(), {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True}, other=other, has_file=False)

    def bert_vocab() -> Kind:
        library = wordpiece()
        words = sorted(library.get_vocab().items(), key=lambda pair: pair[1])
        config = {"tokenizer_class": "BertTokenizer", "do_lower_case": True}
        other = {"vocab.txt": "".join(word + "\n" for word, _ in words)}
        return Kind(library, config, other=other, has_file=False, eos="[SEP]")

    def wordpiece() -> Tokenizer:
        extra = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
        library = trained("WordPiece", "bert", "bert", extra)
        library.decoder = decoders.WordPiece()
        return with_bytes_template(library, "[CLS] $A [SEP]")

    def with_bytes_template(library: Tokenizer, template: str) -> Tokenizer:
        kept = library.decoder
        with_bytes(library, template)
        library.decoder = kept
        return library

    def unigram(pre: str, normal: str = "") -> Tokenizer:
        library = trained("Unigram", pre, normal, ("<pad>", "</s>", "<unk>"), 300)
        library.decoder = decoders.Metaspace()
        return library

    def letters() -> Tokenizer:
        return trained("WordLevel", "letters", "", ("<unk>", "</s>"), 500)

    return {
        "gpt2": lambda: Kind(bpe(), {"tokenizer_class": "GPT2Tokenizer", "model_max_length": int(1e30)}),
        "gpt2 prefix": lambda: Kind(bpe(), {"tokenizer_class": "GPT2TokenizerFast", "add_prefix_space": True}),
        "gpt2 by its model": lambda: Kind(bpe("bytes prefix"), None, model={"model_type": "gpt2"}),
        "gpt2 of vocab and merges": vocab_files,
        "neox": lambda: Kind(bpe(), {"tokenizer_class": "GPTNeoXTokenizerFast"}),
        "cohere": lambda: Kind(bpe(), {"tokenizer_class": "CohereTokenizerFast", "eos_token": END}),
        "bytes as they are": lambda: Kind(bpe("bytes prefix"), named),
        "smollm2": lambda: Kind(bpe("digits bytes"), named),
        "llama 3": lambda: Kind(with_bytes(bpe("gpt4"), f"{END} $A"), named, model={"model_type": "llama"}),
        "llama 3 named llama": lambda: Kind(bpe("gpt4"), {"tokenizer_class": "LlamaTokenizerFast", "eos_token": END}),
        "o200k": lambda: Kind(bpe("o200k"), named),
        "deepseek": lambda: Kind(bpe("numbers first"), named),
        "split with prefix": lambda: Kind(bpe("gpt4 prefix", "NFC"), named),
        "pairs of words": lambda: Kind(bpe("pairs of words"), named),
        "bytes in one": lambda: Kind(bpe("bytes whole"), named),
        "qwen2": lambda: Kind(
            bpe("gpt4"),
            {
                "tokenizer_class": "Qwen2Tokenizer",
                "eos_token": "<|im_end|>",
                "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
                "added_tokens_decoder": {"420": decoder_of("<|im_start|>"), "421": decoder_of("<|im_end|>")},
            },
            model={"model_type": "qwen2"},
        ),
        "qwen3.5": lambda: Kind(
            bpe("qwen2", "NFC"), {"tokenizer_class": "Qwen2Tokenizer"}, model={"model_type": "qwen3_5"}
        ),
        "llama 2": lambda: Kind(spm(), {"tokenizer_class": "LlamaTokenizer", "legacy": False}),
        "llama 2 legacy": lambda: Kind(
            spm("metaspace whole", "prepend"), {"tokenizer_class": "LlamaTokenizerFast", "legacy": True}
        ),
        "llama 2 no prefix": lambda: Kind(spm(), {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False}),
        "mistral": lambda: Kind(
            prepending(spm("metaspace whole")),
            {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"},
            model={"model_type": "mistral"},
        ),
        "metaspace always": lambda: Kind(spm("metaspace"), {**fast, "eos_token": "</s>"}),
        "metaspace never": lambda: Kind(spm("metaspace never", keep=False), {**fast, "eos_token": "</s>"}),
        "metaspace first": lambda: Kind(spm("metaspace first"), {**fast, "eos_token": "</s>"}),
        "metaspace whole always": lambda: Kind(spm("metaspace whole always"), {**fast, "eos_token": "</s>"}),
        "merges over blanks": lambda: Kind(
            fallback(trained("BPE", "metaspace whole always", "", SPM)), {**fast, "eos_token": "</s>"}
        ),
        "gemma": lambda: Kind(
            spm("gemma", "replace", keep=False), {"tokenizer_class": "GemmaTokenizer"}, model={"model_type": "gemma2"}
        ),
        "unigram, t5 style": lambda: Kind(
            with_bytes_template(unigram("words metaspace", "NFKC"), "$A </s>"), {**fast, "eos_token": "</s>"}
        ),
        "unigram, xlm-r style": lambda: Kind(unigram("words metaspace", "strip right"), {**fast, "eos_token": "</s>"}),
        "unigram in one": lambda: Kind(
            unigram("metaspace whole"), {**fast, "eos_token": "</s>", "clean_up_tokenization_spaces": True}
        ),
        "unigram, quotes": lambda: Kind(unigram("metaspace", "quotes"), {**fast, "eos_token": "</s>"}),
        "bert": lambda: Kind(wordpiece(), {"tokenizer_class": "BertTokenizer", "do_lower_case": False}, eos="[SEP]"),
        "bert as it is": lambda: Kind(
            wordpiece(), {**fast, "sep_token": "[SEP]", "clean_up_tokenization_spaces": True}, eos="[SEP]"
        ),
        "bert of a vocab.txt": bert_vocab,
        "words": lambda: Kind(
            trained("WordLevel", "words", "lower", ("<unk>", "</s>"), 300),
            {**fast, "eos_token": "</s>", "clean_up_tokenization_spaces": True},
        ),
        "words, punctuation": lambda: Kind(
            trained("WordLevel", "punctuation", "", ("<unk>", "</s>"), 300), {**fast, "eos_token": "</s>"}
        ),
        "letters": lambda: Kind(letters(), {**fast, "eos_token": "</s>"}),
        "delimiter": lambda: Kind(trained("WordLevel", "delimiter", "NFD", ("<unk>", "</s>"), 300), None),
        "stripping": lambda: Kind(bpe("gpt2", "strip"), named),
        "added tokens": lambda: Kind(with_marks(bpe()), named),
        "added tokens, normalized": lambda: Kind(
            with_marks(trained("WordLevel", "words", "lower", ("<unk>", "</s>"), 300)), {**fast, "eos_token": "</s>"}
        ),
        "added tokens, metaspace": lambda: Kind(with_marks(prepending(spm())), {**fast, "eos_token": "</s>"}),
        "tokens of the config": lambda: Kind(
            bpe(),
            {
                **fast,
                "eos_token": "<|im_end|>",
                "pad_token": {"__type": "AddedToken", **decoder_of("<pad>", lstrip=True)},
                "image_token": "<image>",
                "extra_special_tokens": ["<added>"],
            },
        ),
        "roles of the model's own": lambda: Kind(
            bpe(), {**fast, "eos_token": "</s>", "extra_special_tokens": {"boi_token": "<added>", "eoi": "<left>"}}
        ),
        "added_tokens_decoder": lambda: Kind(
            with_marks(bpe()),
            {
                **named,
                "added_tokens_decoder": {
                    "0": decoder_of(END),
                    "999": decoder_of("<late>", special=False, normalized=True),
                    "420": decoder_of("<added>", lstrip=True, rstrip=True, special=False),
                },
            },
        ),
        "special_tokens_map.json": lambda: Kind(
            bpe(),
            fast,
            {
                "bos_token": "<s>",
                "eos_token": decoder_of("</s>", rstrip=True),
                "additional_special_tokens": ["<added>", "<left>"],
            },
        ),
        "one token named twice": lambda: Kind(
            bpe(), fast, {"eos_token": decoder_of("<right>", lstrip=True), "additional_special_tokens": ["<right>"]}
        ),
        "one token with settings twice": lambda: Kind(
            bpe(),
            fast,
            {
                "pad_token": "<right>",
                "eos_token": decoder_of("<right>", lstrip=True),
                "sep_token": decoder_of("<right>", rstrip=True),
            },
        ),
        "added_tokens.json": lambda: Kind(
            bpe(), named, {"pad_token": "<pad>"}, {"<added>": 421, "<left>": 420, "<pad>": 422}
        ),
        "all the files": lambda: Kind(
            with_marks(bpe(), MARKS[:2]),
            {**fast, "additional_special_tokens": ["<right>"], "split_special_tokens": False},
            {"eos_token": "<|im_end|>", "unk_token": END, "extra_special_tokens": ["<s>", {"content": "</s>"}]},
            {"<late>": 900, "<|im_end|>": 800},
            other={"chat_template.jinja": "{{ messages }}"},
        ),
        "splits special tokens": lambda: Kind(with_marks(bpe()), {**named, "split_special_tokens": True}),
    }


def prepending(library: Tokenizer) -> Tokenizer:
    """As older Llama 2 and Mistral files are: the blank is made by normalizers, and nothing is cut."""
    library.normalizer = NORMAL["prepend"]()
    spec = json.loads(library.to_str())
    return Tokenizer.from_str(json.dumps({**spec, "pre_tokenizer": None}))


def random_kind(seed: int) -> Kind:
    """Of parts that fit together or do not; the library takes them all."""
    rng = random.Random(seed)
    model = rng.choice(["BPE", "BPE", "BPE", "Unigram", "WordPiece", "WordLevel"])
    pre = rng.choice(sorted(PRE))
    normal = rng.choice(["", "", *sorted(NORMAL)])
    extra = {"Unigram": ("<pad>", "</s>", "<unk>"), "WordPiece": ("[UNK]", "</s>")}.get(model, ("<unk>", "</s>"))
    alphabet = "bytes" if "bytes" in pre or rng.random() < 0.2 else ""
    library = trained(model, pre, normal, extra, rng.choice([300, 420]), alphabet if model != "Unigram" else "")
    # What a text is prepared with need not be what was trained with.
    if rng.random() < 0.3:
        library.normalizer = NORMAL[rng.choice(sorted(NORMAL))]()
    if rng.random() < 0.2:
        library.pre_tokenizer = PRE[rng.choice(sorted(PRE))]()
    if model == "BPE" and rng.random() < 0.4:
        library = fallback(library)
    marks = [
        AddedToken(
            rng.choice(["<added>", "<left>", "<right>", "whole", "a b", "The", " w", "x\n", "海", "1"]),
            **{flag: rng.random() < 0.3 for flag in ("lstrip", "rstrip", "single_word", "normalized", "special")},
        )
        for _ in range(rng.choice([0, 0, 1, 3]))
    ]
    library.add_tokens(marks)
    names = ["<s>", "</s>", "<pad>", "<new>", "<added>", "whole"]
    config: dict[str, Any] = {"tokenizer_class": rng.choice(["PreTrainedTokenizerFast", "Unheard", None])}
    config |= {role: rng.choice(names) for role in ("bos_token", "pad_token", "image_token") if rng.random() < 0.4}
    config["eos_token"] = rng.choice(names)
    if rng.random() < 0.3:
        config["extra_special_tokens"] = rng.sample(names, 2)
    if rng.random() < 0.3:
        flags = {flag: rng.random() < 0.4 for flag in ("lstrip", "rstrip", "single_word", "normalized", "special")}
        config["added_tokens_decoder"] = {str(rng.randrange(900)): {"content": rng.choice(names), **flags}}
    if rng.random() < 0.2:
        config["clean_up_tokenization_spaces"] = True
    special = {"unk_token": rng.choice(names), "bos_token": rng.choice(names)} if rng.random() < 0.3 else None
    added = {name: 700 + i for i, name in enumerate(rng.sample(names, 3))} if rng.random() < 0.3 else None
    if model == "BPE" and rng.random() < 0.25:
        config["tokenizer_class"] = rng.choice(
            ["GPT2Tokenizer", "LlamaTokenizer", "Qwen2TokenizerFast", "GemmaTokenizer"]
        )
        config["add_prefix_space"] = rng.choice([True, False, None])
        config["legacy"] = rng.choice([True, False])
    return Kind(library, config, special, added)

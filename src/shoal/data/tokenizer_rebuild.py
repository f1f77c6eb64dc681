"""What the classes of transformers make of a vocabulary and its merges, whatever else tokenizer.json says.

From tokenizer.json these classes take vocabulary, merges and (some of them) post-processor; normalizer, pre-tokenizer
and decoder are their own. One function a class, each a copy of what `__init__` of that class does in transformers 5.22.
A class that is not here is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shoal.data.word_ids import QWEN2
from shoal.values import BadValue, flag, inside

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

Settings = Mapping[str, Any]
_END = "<|endoftext|>"
_QWEN3_5 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Rebuilt:
    """What stands in `__init__` of a class."""

    model: str
    """The type of model that it wants."""
    make: Callable[[Any, Settings], Library]
    """From the library's model and the settings."""
    tokens: dict[str, str | None] = field(default_factory=dict)
    """The special tokens that it has if nobody names others; null in a file means that there is none."""
    options: Callable[[Settings], dict[str, Any]] = lambda settings: {}
    """Of the model."""
    files: tuple[str, ...] = ()
    """Instead of tokenizer.json."""
    template: str = "the file's"
    """Which post-processor holds: the file's, "none", or "bert"."""
    again: str = ""
    """How its special tokens are added once more: as "added" or as "special" tokens."""


def _byte_level(normal: bool, digits: bool = False) -> Callable[[Any, Settings], Library]:
    def make(model: Any, settings: Settings) -> Library:
        from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers

        library = Tokenizer(model)
        if normal:
            library.normalizer = normalizers.NFC()
        prefix = setting(settings, "add_prefix_space", False)
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
        if digits:
            each = pre_tokenizers.Digits(individual_digits=True)
            library.pre_tokenizer = pre_tokenizers.Sequence([each, pre_tokenizers.ByteLevel(add_prefix_space=prefix)])
        library.decoder = decoders.ByteLevel()
        return library

    return make


def _split(pattern: str) -> Callable[[Any, Settings], Library]:
    def make(model: Any, settings: Settings) -> Library:
        from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers

        library = Tokenizer(model)
        library.normalizer = normalizers.NFC()
        prefix = setting(settings, "add_prefix_space", False)
        words = pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)
        letters = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False)
        library.pre_tokenizer = pre_tokenizers.Sequence([words, letters])
        library.decoder = decoders.ByteLevel()
        return library

    return make


def _llama(model: Any, settings: Settings) -> Library:
    from tokenizers import Tokenizer, decoders, pre_tokenizers

    library = Tokenizer(model)
    prefix = setting(settings, "add_prefix_space", True)
    scheme = "never" if not prefix else "always" if setting(settings, "legacy", False) else "first"
    library.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(content=" ", left=1))
    library.decoder = decoders.Sequence(steps)
    return library


def _gemma(model: Any, settings: Settings) -> Library:
    from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers

    library = Tokenizer(model)
    library.normalizer = normalizers.Replace(" ", "▁")
    library.pre_tokenizer = pre_tokenizers.Split(pattern=" ", behavior="merged_with_previous", invert=False)
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return library


def _bert(model: Any, settings: Settings) -> Library:
    from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers

    library = Tokenizer(model)
    library.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=setting(settings, "tokenize_chinese_chars", True),
        strip_accents=setting(settings, "strip_accents", None),
        lowercase=setting(settings, "do_lower_case", True),
    )
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece(prefix="##")
    return library


def setting(settings: Settings, key: str, otherwise: bool | None) -> Any:
    """A setting that is true or false; null is as if it were not there."""
    if settings.get(key) is None:
        return otherwise
    with inside(key):
        return flag(settings[key])


def _named(settings: Settings, key: str) -> str | None:
    token = settings.get(key)
    if token is not None and not isinstance(token, str):
        raise BadValue(f"no name of a token in {key}")
    return token


_BYTES = {"continuing_subword_prefix": "", "end_of_word_suffix": "", "fuse_unk": False}
_FALLBACK = {"fuse_unk": True, "byte_fallback": True}
_MERGED = ("vocab.json", "merges.txt")
_GPT2 = dict.fromkeys(("unk_token", "bos_token", "eos_token"), _END)
_QWEN: dict[str, str | None] = {"unk_token": _END, "bos_token": None, "eos_token": _END, "pad_token": _END}
_LLAMA = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
_GEMMA = {"unk_token": "<unk>", "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
_COHERE = {
    "unk_token": "<UNK>",
    "bos_token": "<BOS_TOKEN>",
    "eos_token": "<|END_OF_TURN_TOKEN|>",
    "pad_token": "<PAD>",
    "cls_token": "<CLS>",
    "sep_token": "<SEP>",
    "mask_token": "<MASK_TOKEN>",
}
_BERT = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "sep", "pad", "cls", "mask")}

REBUILT = {
    "GPT2Tokenizer": Rebuilt("BPE", _byte_level(normal=False), {**_GPT2}, lambda _: _BYTES, _MERGED),
    "GPTNeoXTokenizer": Rebuilt(
        "BPE",
        _byte_level(normal=True),
        {**_GPT2, "pad_token": "<|padding|>"},
        lambda _: _BYTES,
        _MERGED,
        template="none",
    ),
    "CohereTokenizer": Rebuilt(
        "BPE", _byte_level(normal=True, digits=True), {**_COHERE}, lambda _: _BYTES, _MERGED, again="special"
    ),
    "Qwen2Tokenizer": Rebuilt("BPE", _split(QWEN2), _QWEN, lambda _: _BYTES, _MERGED, again="added"),
    "Qwen3_5Tokenizer": Rebuilt("BPE", _split(_QWEN3_5), _QWEN, lambda _: _BYTES, _MERGED),
    "LlamaTokenizer": Rebuilt("BPE", _llama, {**_LLAMA}, lambda _: _FALLBACK),
    "GemmaTokenizer": Rebuilt(
        "BPE",
        _gemma,
        {**_GEMMA, "mask_token": "<mask>"},
        lambda settings: {**_FALLBACK, "unk_token": str(_named(settings, "unk_token"))},
    ),
    "BertTokenizer": Rebuilt(
        "WordPiece",
        _bert,
        {**_BERT},
        lambda settings: {"unk_token": str(_named(settings, "unk_token"))},
        ("vocab.txt",),
        template="bert",
    ),
}

"""Text to token ids and back: byte-level, which needs no file, or any Hugging Face `tokenizer.json`.

`load_tokenizer` takes "byte", a tokenizer.json, a folder that holds one (such as a Hugging Face model), or a data set.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from shoal.data.index import INDEX_FILE, dtype_for, parse_index
from shoal.data.words import WordIds, splits_before_spaces
from shoal.errors import DataError

if TYPE_CHECKING:
    from shoal.data.shards import TokenShards

BYTE = "byte"
TOKENIZER_FILE = "tokenizer.json"
# The names that published tokenizers give the token after which a document is over.
END_OF_TEXT = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>")

# What the library makes of a text (strings, offsets, masks) is 100 times as large as its ids: not too much at once.
GROUP_CHARS = 1 << 19

Ids = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]


class Tokenizer(Protocol):
    """Encoding adds no special token of its own; whoever writes documents ends each with `eos_id`."""

    name: str  # as index.json states it: "byte" or "tokenizer.json"
    vocab_size: int
    eos_id: int

    def encode(self, text: str) -> list[int]: ...

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def spelled(self, token: int) -> str:
        """One id for a person to read, special tokens by their names; part of a letter may be in it."""
        ...

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Put what is needed to load it again into `folder`."""
        ...


class ByteTokenizer:
    """Ids 0 to 255 are the bytes of UTF-8, 256 ends a document."""

    name = BYTE
    vocab_size = 257
    eos_id = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.uint16) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    def spelled(self, token: int) -> str:
        return chr(token) if token < 128 else f"<byte {token}>" if token < 256 else "<end>"

    def save(self, folder: str | os.PathLike[str]) -> None:
        """There is nothing to save."""


class JsonTokenizer:
    """A Hugging Face tokenizer.json. Special tokens spelled out in a text become their ids, as in `transformers`."""

    name = TOKENIZER_FILE

    def __init__(self, content: str, where: str, eos: str | int | None = None, eos_hint: str | None = None) -> None:
        """`eos` names the end-of-text token (or its id); `eos_hint` is what a file beside it names."""
        from tokenizers import Tokenizer as Library

        self.content = content
        try:
            self._library = Library.from_str(content)
        except Exception as e:  # the library raises bare Exception for whatever is wrong with the file
            raise DataError(
                f"{where} is no tokenizer that can be read ({_first_line(e)}); give a tokenizer.json."
            ) from None
        # Both are meant for batches that a model is fed; here they would cut or pad documents without a word.
        self._library.no_truncation()
        self._library.no_padding()
        spec = json.loads(content)
        if spec["model"].get("dropout"):  # makes the ids random: meant for training a model on the fly
            self._library.model.dropout = None
        ids = self._library.get_vocab(with_added_tokens=True)
        self.vocab_size = max(ids.values(), default=-1) + 1  # not the count: published vocabularies have holes
        self.eos_id = _eos_id(ids, where, eos, eos_hint)
        self.dtype = np.dtype(dtype_for(self.vocab_size))
        # encode_batch_fast leaves out the offsets; older versions of the library lack it.
        self._encode_batch = getattr(self._library, "encode_batch_fast", self._library.encode_batch)
        self._words = WordIds(self._encode, self.dtype) if splits_before_spaces(spec) else None

    @property
    def exact_cut(self) -> bool:
        """Whether a text may be cut before a space that follows a word without changing a single id."""
        return self._words is not None

    def encode(self, text: str) -> list[int]:
        return self._encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        if self._words is not None:
            return [self._words.encode(text) for text in texts]
        ids: list[Ids] = []
        group: list[str] = []
        chars = 0
        for i, text in enumerate(texts):
            group.append(text)
            chars += len(text)
            if chars >= GROUP_CHARS or i == len(texts) - 1:
                ids += [np.array(e.ids, self.dtype) for e in self._encode_batch(group, add_special_tokens=False)]
                group, chars = [], 0
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._library.decode([int(i) for i in ids], skip_special_tokens=True))

    def spelled(self, token: int) -> str:
        return str(self._library.decode([token], skip_special_tokens=False))

    def save(self, folder: str | os.PathLike[str]) -> None:
        (Path(folder) / TOKENIZER_FILE).write_text(self.content, encoding="utf-8")

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._library.encode(text, add_special_tokens=False).ids
        return ids


def load_tokenizer(where: str | os.PathLike[str], eos: str | int | None = None) -> Tokenizer:
    """`where` as the module says; `eos` names the token that ends a document where the tokenizer leaves that open."""
    if os.fspath(where) == BYTE:
        if eos is not None:
            raise DataError("the byte-level tokenizer ends documents with its own id 256; leave out --eos.")
        return ByteTokenizer()
    path = Path(where)
    if (path / INDEX_FILE).is_file():
        index = parse_index((path / INDEX_FILE).read_bytes(), str(path))
        if index.tokenizer == BYTE:
            return ByteTokenizer()
        eos = index.eos_id if eos is None else eos
    file = path / TOKENIZER_FILE if path.is_dir() else path
    try:
        content = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError(
            f"there is no tokenizer at {file}; give 'byte', a tokenizer.json or a folder that holds one."
        ) from None
    except UnicodeDecodeError as e:
        raise DataError(f"{file} is no tokenizer.json: it is not UTF-8 text (byte {e.start}).") from None
    return JsonTokenizer(content, str(file), eos, _eos_beside(file))


def tokenizer_of(data: TokenShards) -> Tokenizer:
    """The tokenizer whose ids an open data set holds, wherever that is."""
    if data.tokenizer == BYTE:
        return ByteTokenizer()
    content = data.folder.read(data.tokenizer).decode()
    return JsonTokenizer(content, f"{data.where}/{data.tokenizer}", data.eos_id)


def _eos_id(ids: dict[str, int], where: str, eos: str | int | None, hint: str | None) -> int:
    if isinstance(eos, int):
        return eos
    if eos is not None:
        if eos not in ids:
            raise DataError(f"{where} has no token '{eos}', which --eos names; choose one of its special tokens.")
        return ids[eos]
    for name in (hint, *END_OF_TEXT):
        if name in ids:
            return ids[name]
    raise DataError(
        f"{where} has none of the usual end-of-text tokens ({', '.join(END_OF_TEXT)}); "
        "name the token that ends a document with --eos."
    )


def _eos_beside(file: Path) -> str | None:
    """What the tokenizer_config.json beside a tokenizer.json calls the end: what a model of that folder stops at."""
    try:
        config: Any = json.loads((file.parent / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # it is optional, and what it says is only a hint
    token = config.get("eos_token") if isinstance(config, dict) else None
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _first_line(e: Exception) -> str:
    return (str(e).strip() or type(e).__name__).splitlines()[0].rstrip(".")

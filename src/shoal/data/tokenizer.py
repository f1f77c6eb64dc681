"""Text to token ids and back: byte-level, which needs no file, or any Hugging Face `tokenizer.json`.

`load_tokenizer` takes "byte", a tokenizer.json, a folder that holds one (such as a Hugging Face model), or a data set.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from shoal.data.index import INDEX_FILE, dtype_for, parse_index
from shoal.data.plain_text import plain_encoder
from shoal.data.starts import NO_START, end_of, start_of
from shoal.data.words import WordIds, splits_before_spaces
from shoal.errors import DataError
from shoal.plain_file import read_object

if TYPE_CHECKING:
    from shoal.data.shards import TokenShards

BYTE = "byte"
TOKENIZER_FILE = "tokenizer.json"
# What the library makes of a text (strings, offsets, masks) is 100 times as large as its ids: not too much at once.
GROUP_CHARS = 1 << 19

Ids = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]


class Tokenizer(Protocol):
    """Encoding adds no special token; `shoal.data.starts` says where `start_id` and `eos_id` stand in a document."""

    name: str  # as index.json states it: "byte" or "tokenizer.json"
    vocab_size: int
    eos_id: int
    start_id: int | None

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
    """Ids 0 to 255 are the bytes of UTF-8, 256 starts and ends a document."""

    name = BYTE
    vocab_size = 257
    eos_id = 256

    def __init__(self, start_id: int | None = eos_id) -> None:
        self.start_id = start_id

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
    """A Hugging Face tokenizer.json."""

    name = TOKENIZER_FILE

    def __init__(
        self,
        content: str,
        where: str,
        eos: str | int | None = None,
        start: str | int | None = None,
        config: dict[str, Any] | None = None,
        special: bool = False,
    ) -> None:
        """`eos` and `start` name tokens (or their ids) where the file and `config`, the tokenizer_config.json beside
        it, leave that open or are not to be followed. With `special`, special tokens spelled out in a text become
        their ids, as in `transformers`; else text stays text."""
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
        ids = self._library.get_vocab(with_added_tokens=True)
        self.vocab_size = max(ids.values(), default=-1) + 1  # not the count: published vocabularies have holes
        self.eos_id = end_of(ids, where, eos, config or {})
        self.start_id = start_of(ids, where, start, config, _template(self._library), self.eos_id)
        self.dtype = np.dtype(dtype_for(self.vocab_size))
        self._encoder = self._library if special else plain_encoder(self._library, spec)
        if spec["model"].get("dropout"):  # makes the ids random: meant for training a model on the fly
            self._encoder.model.dropout = None
        # encode_batch_fast leaves out the offsets; older versions of the library lack it.
        self._encode_batch = getattr(self._encoder, "encode_batch_fast", self._encoder.encode_batch)
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
        ids: list[int] = self._encoder.encode(text, add_special_tokens=False).ids
        return ids


def load_tokenizer(
    where: str | os.PathLike[str],
    eos: str | int | None = None,
    start: str | int | None = None,
    special: bool = False,
) -> Tokenizer:
    """`where` as the module says; `eos` and `start` name the tokens that end and start a document where the tokenizer
    leaves that open, or where another (or NO_START) is wanted; `special` as for JsonTokenizer."""
    if os.fspath(where) == BYTE:
        return _bytes(eos, start)
    path = Path(where)
    if (path / INDEX_FILE).is_file():
        index = parse_index((path / INDEX_FILE).read_bytes(), str(path))
        start = _settled(index.start_id) if start is None else start
        if index.tokenizer == BYTE:
            return _bytes(eos, start)
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
    return JsonTokenizer(content, str(file), eos, start, _config_beside(file), special)


def tokenizer_of(data: TokenShards, start: str | None = None, special: bool = False) -> Tokenizer:
    """The tokenizer whose ids an open data set holds, wherever that is; documents start as they do there."""
    begin = _settled(data.start_id) if start is None else start
    if data.tokenizer == BYTE:
        return _bytes(None, begin)
    content = data.folder.read(data.tokenizer).decode()
    return JsonTokenizer(content, f"{data.where}/{data.tokenizer}", data.eos_id, begin, special=special)


def _settled(start_id: int | None) -> str | int:
    """What an index or a job says about starts is no longer open."""
    return NO_START if start_id is None else start_id


def _bytes(eos: str | int | None, start: str | int | None) -> ByteTokenizer:
    own = ByteTokenizer.eos_id
    if eos not in (None, own):
        raise DataError("the byte-level tokenizer ends documents with its own id 256; leave out --eos.")
    if start not in (None, own, NO_START):
        raise DataError(
            f"the byte-level tokenizer starts documents with its own id 256; leave out --start (or give {NO_START})."
        )
    return ByteTokenizer(None if start == NO_START else own)


def _template(library: Any) -> list[int]:
    """The ids that the tokenizer's own post-processor puts before a text."""
    try:
        whole, bare = library.encode("a"), library.encode("a", add_special_tokens=False)
    except Exception:  # bare: a vocabulary of whole words need not know the probe, and then nothing can be told
        return []
    if not bare.ids:
        return []
    marked = zip(whole.ids, whole.special_tokens_mask, strict=True)
    return [token for token, _ in itertools.takewhile(lambda pair: pair[1], marked)]


def _config_beside(file: Path) -> dict[str, Any] | None:
    """The tokenizer_config.json beside a tokenizer.json: what a model of that folder starts with and stops at."""
    try:
        return read_object(file.parent / "tokenizer_config.json")
    except (OSError, ValueError):
        return None  # it is optional


def _first_line(e: Exception) -> str:
    return (str(e).strip() or type(e).__name__).splitlines()[0].rstrip(".")

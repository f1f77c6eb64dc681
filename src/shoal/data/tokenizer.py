"""Text to token ids and back: byte-level, which needs no file, or a Hugging Face tokenizer.

`load_tokenizer` takes "byte", a folder (such as a Hugging Face model: all its files count, as in transformers'
AutoTokenizer), its tokenizer.json, another file like that by itself, or a data set.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from shoal.data.cuts import Cuts, cuts_of, without_prefix
from shoal.data.index import INDEX_FILE, dtype_for, parse_index
from shoal.data.plain_text import plain_encoder
from shoal.data.starts import NO_START, end_of, start_of
from shoal.data.token_bytes import bytes_of_tokens
from shoal.data.tokenizer_folder import alone, resolve, spec_of, text_of
from shoal.data.tokenizer_library import asking, asking_quietly, build
from shoal.data.word_ids import WordIds, splits_before_spaces
from shoal.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

    from shoal.data.shards import TokenShards

BYTE = "byte"
TOKENIZER_FILE = "tokenizer.json"
# What the library makes of a text (strings, offsets, masks) is 100 times as large as its ids: not too much at once.
GROUP_CHARS = 1 << 19
PIECE_CHARS = 1 << 18
# What is longer and cannot be cut is refused: 200 bytes a character while it is encoded, within what
# shoal.data.prepare.memory_limit states.
MAX_STRETCH_CHARS = 1 << 21

Ids = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]


class Tokenizer(Protocol):
    """Encoding adds no special token; `shoal.data.starts` says where `start_id` and `eos_id` stand in a document."""

    name: str  # as index.json states it: "byte" or "tokenizer.json"
    vocab_size: int
    eos_id: int
    start_id: int | None
    special: bool  # special tokens spelled out in a text become their ids

    def encode(self, text: str) -> list[int]: ...

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def spelled(self, token: int) -> str:
        """One id for a person to read, special tokens by their names; part of a letter may be in it."""
        ...

    def token_bytes(self) -> list[bytes]:
        """Of each id what it adds to a text; nothing for special tokens. DataError where that depends on others."""
        ...

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Put what is needed to load it again into `folder`."""
        ...


class ByteTokenizer:
    """Ids 0 to 255 are the bytes of UTF-8, 256 starts and ends a document."""

    name = BYTE
    vocab_size = 257
    eos_id = 256
    special = False

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

    def token_bytes(self) -> list[bytes]:
        return [*(bytes([i]) for i in range(256)), b""]

    def save(self, folder: str | os.PathLike[str]) -> None:
        """There is nothing to save."""


class JsonTokenizer:
    """A Hugging Face tokenizer.json that needs no other file (`shoal.data.tokenizer_folder` makes one of a folder)."""

    name = TOKENIZER_FILE

    def __init__(
        self,
        content: str,
        where: str,
        eos: str | int | None = None,
        start: str | int | None = None,
        config: Mapping[str, Any] | None = None,
        special: bool = False,
        piece_chars: int | None = None,
        spec: dict[str, Any] | None = None,
    ) -> None:
        """`eos` and `start` name tokens (or their ids) where the file and `config`, what the folder says about them,
        leave that open or are not to be followed. With `special`, special tokens spelled out in a text become their
        ids, as in `transformers`; else text stays text. Longer texts than `piece_chars` are encoded in pieces. `spec`
        is what `content` holds, where it was read already."""
        self.content = content
        self.special = special
        self._where = where
        self.named = config or {}  # `bos_token` and the like, as the folder spells them
        self._piece_chars = PIECE_CHARS if piece_chars is None else piece_chars
        spec = spec_of(content, where) if spec is None else spec
        self._spec = spec
        self._library = build(content, where)
        with asking_quietly(where):
            # Both are meant for batches that a model is fed; here they would cut or pad documents without a word.
            self._library.no_truncation()
            self._library.no_padding()
            ids = self._library.get_vocab(with_added_tokens=True)
            self.vocab_size = max(ids.values(), default=-1) + 1  # not the count: published vocabularies have holes
            self.eos_id = end_of(ids, where, eos, config or {})
            self.template = tuple(_template(self._library))
            """What it puts before a text by itself, as transformers does where nobody says otherwise."""
            self.start_id = start_of(ids, where, start, config, self.template, self.eos_id)
            self.dtype = np.dtype(dtype_for(self.vocab_size))
            self._encoder = self._made(self._library, spec)
        self._words = WordIds(self._encode, self.dtype) if splits_before_spaces(spec) else None

    @property
    def looks_words_up(self) -> bool:
        """Whether the ids of words that were seen before are known (`shoal.data.word_ids`)."""
        return self._words is not None

    @property
    def exact_cut(self) -> bool:
        """Whether there are texts that can be cut without changing a single id (`shoal.data.cuts`)."""
        return self._cuts is not None

    def encode(self, text: str) -> list[int]:
        if len(text) > self._piece_chars:
            return [int(i) for i in self.encode_batch([text])[0]]
        with asking(self._where):
            return self._encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Of each text the ids that the library gives for the whole of it, however long it is."""
        with asking(self._where):
            whole = [self._cut(text) for text in texts]
            first = self._in_groups([pieces[0] for pieces in whole], self._encoder)
            rest = [piece for pieces in whole for piece in pieces[1:]]
            following = iter(self._in_groups(rest, self._inner) if rest else [])
            return [
                ids if len(pieces) == 1 else np.concatenate([ids, *itertools.islice(following, len(pieces) - 1)])
                for pieces, ids in zip(whole, first, strict=True)
            ]

    def decode(self, ids: Sequence[int]) -> str:
        with asking(self._where):
            return str(self._library.decode([int(i) for i in ids], skip_special_tokens=True))

    def spelled(self, token: int) -> str:
        with asking(self._where):
            return str(self._library.decode([token], skip_special_tokens=False))

    def token_bytes(self) -> list[bytes]:
        with asking(self._where):
            return bytes_of_tokens(self._library, self._spec, self._where)

    def save(self, folder: str | os.PathLike[str]) -> None:
        (Path(folder) / TOKENIZER_FILE).write_text(self.content, encoding="utf-8")

    @cached_property
    def _cuts(self) -> Cuts | None:
        """When the first long text comes."""
        return cuts_of(self._spec, self.special)

    @cached_property
    def _inner(self) -> Library:
        """For a piece that does not begin its text: without what is put before a beginning."""
        if self._cuts is None or not self._cuts.prepends:
            return self._encoder
        inner = without_prefix(self._spec)
        return self._made(build(json.dumps(inner), self._where), inner)

    def _made(self, library: Library, spec: Mapping[str, Any]) -> Library:
        """What encodes texts."""
        encoder = library if self.special else plain_encoder(library, spec)
        if spec["model"].get("dropout"):  # makes the ids random: meant for training a model on the fly
            encoder.model.dropout = None
        return encoder

    def _cut(self, text: str) -> list[str]:
        pieces = [text]
        if len(text) > self._piece_chars and self._cuts is not None:
            pieces = self._cuts.pieces(text, self._piece_chars)
        longest = max(map(len, pieces))
        if longest > MAX_STRETCH_CHARS:
            raise DataError(
                f"a text has {longest:,} characters in a row within which {self._where} cannot be shown to cut, and at "
                f"most {MAX_STRETCH_CHARS:,} are encoded at once; cut the text, or leave it out."
            )
        return pieces

    def _in_groups(self, texts: Sequence[str], encoder: Library) -> list[Ids]:
        if self._words is not None:
            return [self._words.encode(text) for text in texts]
        # encode_batch_fast leaves out the offsets; older versions of the library lack it.
        encode = getattr(encoder, "encode_batch_fast", encoder.encode_batch)
        ids: list[Ids] = []
        group: list[str] = []
        chars = 0
        for i, text in enumerate(texts):
            group.append(text)
            chars += len(text)
            if chars >= GROUP_CHARS or i == len(texts) - 1:
                ids += [np.array(e.ids, self.dtype) for e in encode(group, add_special_tokens=False)]
                group, chars = [], 0
        return ids

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
        found = alone(path / TOKENIZER_FILE)  # made of a whole folder already
    elif path.is_dir() or path.name == TOKENIZER_FILE:
        found = resolve(path if path.is_dir() else path.parent)
    else:
        found = alone(path)
    file = str(path / TOKENIZER_FILE if path.is_dir() else path)
    special = special and not found.splits
    return JsonTokenizer(found.content, file, eos, start, found.named, special, spec=found.spec)


def tokenizer_of(data: TokenShards, start: str | None = None, special: bool = False) -> Tokenizer:
    """The tokenizer whose ids an open data set holds, wherever that is; documents start as they do there."""
    begin = _settled(data.start_id) if start is None else start
    if data.tokenizer == BYTE:
        return _bytes(None, begin)
    where = f"{data.where}/{data.tokenizer}"
    content = text_of(data.folder.read(data.tokenizer), where)
    return JsonTokenizer(content, where, data.eos_id, begin, special=special)


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
        return []  # (a panic is no Exception, and is for `asking`)
    if not bare.ids:
        return []
    marked = zip(whole.ids, whole.special_tokens_mask, strict=True)
    return [token for token, _ in itertools.takewhile(lambda pair: pair[1], marked)]

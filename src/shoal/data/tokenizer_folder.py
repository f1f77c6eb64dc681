"""A tokenizer is the whole folder: what transformers' AutoTokenizer makes of all its files, as one tokenizer.json.

tokenizer_config.json, special_tokens_map.json and added_tokens.json name tokens that tokenizer.json need not have, and
say how; the class that they (or config.json) name may replace the pipeline. `resolve` reads them all and gives one
tokenizer.json that does alone what the folder does, so that a data set or a model that carries it needs no other file.
The rules are those of transformers 5.22, which is not needed to run them (docs/decisions/066).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal import values
from shoal.data.tokenizer_classes import BACKEND, class_of
from shoal.data.tokenizer_library import (
    MOST_BYTES,
    MOST_TOKENS,
    asking_quietly,
    bound_ids,
    bounded,
    build,
    look_at_added,
)
from shoal.data.tokenizer_rebuild import REBUILT, Rebuilt, setting
from shoal.data.tokenizer_tokens import Tokens, gathered
from shoal.errors import DataError
from shoal.plain_file import is_plain, read_plain
from shoal.values import BadValue, inside

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

FILE = "tokenizer.json"
CONFIG, SPECIAL, ADDED, MODEL = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json"
# All of a folder that says how text becomes tokens, in whichever way; to be copied together.
TOKENIZER_FILES = (
    *(FILE, CONFIG, SPECIAL, ADDED, "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "chat_template.jinja"),
)
_SMALL_BYTES = 16 << 20
_HOW = "open the folder with transformers' AutoTokenizer, and save_pretrained() into a new one: that writes it"


@dataclass(frozen=True)
class Resolved:
    """What a folder says."""

    content: str
    """A tokenizer.json that needs no other file; the folder's own, byte for byte, where the others add nothing."""
    named: Mapping[str, Any] | None
    """`bos_token`, `eos_token` and `add_bos_token` as the folder has them; None where no file names any."""
    splits: bool
    """`split_special_tokens`: special tokens spelled out in a text are never taken for themselves."""
    spec: dict[str, Any] | None = None
    """What the content holds, where it was read already."""


def resolve(folder: Path) -> Resolved:
    """What AutoTokenizer makes of the folder."""
    try:
        return _resolve(folder)
    except BadValue as e:
        raise DataError(f"{e}; correct it, or take the file away.") from None
    except OSError as e:
        raise DataError(f"{e.filename or folder} cannot be read ({e.strerror or e}).") from None


def alone(file: Path) -> Resolved:
    """Of a tokenizer.json by itself."""
    content, spec = _content(file)
    return Resolved(content, None, splits=False, spec=spec)


def _resolve(folder: Path) -> Resolved:
    file = folder / FILE
    config, model = _small(folder / CONFIG), _small(folder / MODEL) or {}
    content, spec = _content(file) if is_plain(file) else ("", None)
    if config is None and not is_plain(folder / SPECIAL) and not is_plain(folder / ADDED) and not model:
        if spec is None:
            raise _nothing(folder, BACKEND)
        return Resolved(content, None, splits=False, spec=spec)
    said = config or {}
    with inside(str(folder / CONFIG)):
        _refuse(said)
        name = _class_of(said, model, '"ByteLevel"' in content)
    rebuilt = None if name == BACKEND else REBUILT.get(name)
    if name != BACKEND and rebuilt is None:
        raise DataError(
            f"{folder} has a tokenizer of the class {name} (tokenizer_class, or model_type of its config.json), which "
            f"transformers builds by rules of its own that Shoal does not know; set tokenizer_class in {CONFIG} to "
            "PreTrainedTokenizerFast if tokenizer.json is to be taken as it is."
        )
    tokens = gathered(
        said, _small(folder / SPECIAL), _small(folder / ADDED), spec, rebuilt.tokens if rebuilt else {}, str(folder)
    )
    with inside(str(folder / CONFIG)):
        if spec is not None and rebuilt is None and tokens.are_all_in(spec):
            kind = str(spec["model"].get("type"))
        else:
            library = _build(rebuilt, name, spec, content, folder, said, tokens)
            before = _described(library)
            with asking_quietly(str(folder)):
                tokens.add_to(library, rebuilt.again if rebuilt else "")
                if rebuilt is not None:
                    _set_template(library, rebuilt, spec, said, tokens)
                if rebuilt is not None or before != _described(library):
                    content, spec = _written(library, before), None
            kind = type(library.model).__name__
        if _cleans(said, kind):
            content, spec = _cleaning(content), None
        splits = bool(setting(said, "split_special_tokens", False))
    silent = config is None and rebuilt is None and not any(tokens.names().values())
    named = None if silent else {**tokens.names(), "add_bos_token": said.get("add_bos_token")}
    return Resolved(content, named, splits, spec)


def _content(file: Path) -> tuple[str, dict[str, Any]]:
    try:
        raw = read_plain(file, MOST_BYTES)
    except FileNotFoundError:
        raise DataError(
            f"there is no tokenizer at {file}; give 'byte', a tokenizer.json or a folder that holds one."
        ) from None
    except OSError as e:
        raise DataError(f"{file} cannot be read ({e.strerror or e}); give a tokenizer.json.") from None
    content = text_of(raw, str(file))
    return content, spec_of(content, str(file))


def text_of(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as e:
        raise DataError(f"{where} is no tokenizer.json: it is not UTF-8 text (byte {e.start}).") from None


def spec_of(content: str, where: str) -> dict[str, Any]:
    """What a tokenizer.json holds, within bounds."""
    try:
        spec = values.read_object(content.encode(), most_parts=MOST_TOKENS, huge=True, most_bytes=MOST_BYTES)
    except BadValue as e:
        raise DataError(f"{where} is no tokenizer that can be used ({e.reason}); give a tokenizer.json.") from None
    bounded(spec, where)
    return spec


def _small(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    with inside(str(path)):
        return values.read_object(read_plain(path, _SMALL_BYTES), huge=True)


def _class_of(said: Mapping[str, Any], model: Mapping[str, Any], byte_level: bool) -> str:
    named, config_class = (_text(where, "tokenizer_class") for where in (said, model))
    return class_of(_text(model, "model_type") or "", _text(model, "model_name") or "", config_class, named, byte_level)


def _text(said: Mapping[str, Any], key: str) -> str | None:
    with inside(key):
        return None if said.get(key) is None else values.text(said[key], 1000)


def _refuse(said: Mapping[str, Any]) -> None:
    """Settings that change the tokenizer in ways that are not reproduced."""
    code = said.get("auto_map")
    if isinstance(code, list) or (isinstance(code, dict) and code.get("AutoTokenizer")):
        raise BadValue("the tokenizer is code that comes with the folder, which Shoal does not run", "auto_map")
    if said.get("init_inputs"):
        raise BadValue("arguments for a class of transformers, which Shoal does not know", "init_inputs")
    if said.get("fix_mistral_regex"):
        raise BadValue("transformers may replace the pattern of this tokenizer, Shoal does not", "fix_mistral_regex")
    versions = said.get("fast_tokenizer_files")
    if versions and versions != [FILE]:
        raise BadValue(f"another file than {FILE} for some versions of transformers", "fast_tokenizer_files")


def _nothing(folder: Path, name: str) -> DataError:
    if name == BACKEND and is_plain(folder / "tokenizer.model"):
        return DataError(
            f"there is no tokenizer at {folder / FILE}, and a tokenizer.model (SentencePiece) is not read; {_HOW}."
        )
    there = [file for file in ("vocab.json", "vocab.txt", "merges.txt", "tekken.json") if is_plain(folder / file)]
    if there:
        return DataError(
            f"there is no tokenizer at {folder / FILE}, and {', '.join(there)} alone with the tokenizer_class "
            f"'{name}' are not enough to make one; {_HOW}."
        )
    return DataError(
        f"there is no tokenizer at {folder / FILE}; give 'byte', a tokenizer.json or a folder that holds one."
    )


def _build(
    rebuilt: Rebuilt | None,
    name: str,
    spec: Mapping[str, Any] | None,
    content: str,
    folder: Path,
    said: Mapping[str, Any],
    tokens: Tokens,
) -> Library:
    if rebuilt is not None:
        return _rebuild(rebuilt, name, spec, folder, said, tokens)
    if spec is None:
        raise _nothing(folder, name)
    return build(content, str(folder / FILE))


def _rebuild(
    how: Rebuilt, name: str, spec: Mapping[str, Any] | None, folder: Path, said: Mapping[str, Any], tokens: Tokens
) -> Library:
    from tokenizers import models

    if spec is None:
        if not how.files or not all(is_plain(folder / file) for file in how.files):
            raise _nothing(folder, BACKEND if is_plain(folder / "tokenizer.model") else name)
        for file in how.files:
            read_plain(folder / file, MOST_BYTES)
        with asking_quietly(" and ".join(str(folder / file) for file in how.files)):
            read = getattr(models, how.model).read_file(*(str(folder / file) for file in how.files))
        parts = read if how.model == "BPE" else (read,)
        bound_ids(parts[0].values())
    else:
        model = spec["model"]
        if model.get("type") != how.model or not isinstance(model["vocab"], dict):
            raise BadValue(f"a {name} has a {how.model} model, but tokenizer.json has another", "tokenizer_class")
        merges = [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in model.get("merges") or []]
        parts = (model["vocab"], merges) if how.model == "BPE" else (model["vocab"],)
    with asking_quietly(str(folder)):
        return how.make(getattr(models, how.model)(*parts, **how.options(tokens.names())), said)


def _set_template(
    library: Library, how: Rebuilt, spec: Mapping[str, Any] | None, said: Mapping[str, Any], tokens: Tokens
) -> None:
    """The post-processor. `add_bos_token` and `add_eos_token` count only where there is no tokenizer.json."""
    from tokenizers import Tokenizer, models, processors

    own = None if spec is None else spec.get("post_processor")
    names = tokens.names()
    if how.template == "bert":
        ends = [(str(names[key]), library.token_to_id(str(names[key]))) for key in ("cls_token", "sep_token")]
        library.post_processor = processors.TemplateProcessing(
            single=f"{ends[0][0]} $A {ends[1][0]}",
            pair=f"{ends[0][0]} $A {ends[1][0]} $B:1 {ends[1][0]}:1",
            special_tokens=ends,
        )
        return
    if own is not None and how.template != "none":
        empty = json.loads(Tokenizer(models.BPE()).to_str())
        library.post_processor = Tokenizer.from_str(json.dumps({**empty, "post_processor": own})).post_processor
        return
    marks = {}
    for key in ("bos", "eos"):
        wanted = spec is None and setting(said, f"add_{key}_token", False)
        marks[key] = names.get(f"{key}_token") if wanted else None
    pieces = [marks["bos"], "$A", marks["eos"]]
    library.post_processor = processors.TemplateProcessing(
        single=" ".join(piece for piece in pieces if piece),
        pair=" ".join(piece for piece in [*pieces, marks["bos"], "$B:1", marks["eos"]] if piece),
        special_tokens=[(m, library.token_to_id(m)) for m in dict.fromkeys(marks.values()) if m],
    )


def _described(library: Library) -> dict[int, str]:
    return {i: repr(token) for i, token in library.get_added_tokens_decoder().items()}


def _written(library: Library, before: Mapping[int, str]) -> str:
    """As a tokenizer.json. In memory the library remembers that a token was special once, even if it was added anew as
    one that is not; in a file there is one word for it, so the file says special."""
    spec = json.loads(library.to_str())
    for token in spec["added_tokens"]:
        token["special"] = token["special"] or "special=True" in before.get(token["id"], "")
    content = json.dumps(spec, ensure_ascii=False)
    again = type(library).from_str(content)
    look_at_added(again)
    for i, token in library.get_added_tokens_decoder().items():
        if before.get(i, repr(token)) == repr(token):
            continue
        for split in (False, True):
            library.encode_special_tokens = again.encode_special_tokens = split
            if any(
                library.encode(text).ids != again.encode(text).ids for text in (token.content, f"a {token.content}a")
            ):
                raise BadValue(
                    "the files of the folder contradict each other about this token", values.shown(token.content)
                )
        if library.decode([i]) != again.decode([i]):
            raise BadValue(
                "the files of the folder contradict each other about this token", values.shown(token.content)
            )
    return content


def _cleans(said: Mapping[str, Any], model: str) -> bool:
    """Whether transformers takes blanks before punctuation away when it decodes."""
    forced = setting(said, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False)
    return bool(setting(said, "clean_up_tokenization_spaces", False)) and (model != "BPE" or bool(forced))


def _cleaning(content: str) -> str:
    """The same tokenizer, with what transformers does after decoding as steps of its decoder."""
    spec = json.loads(content)
    # Without a decoder the library puts blanks between tokens; so does this one, whose prefix is in no token.
    decoder = spec.get("decoder") or {"type": "WordPiece", "prefix": "\x00\x00", "cleanup": False}
    swaps = [(" " + mark, mark) for mark in ".?!,"] + [(" ' ", "'")]
    swaps += [(" " + end, end) for end in ("n't", "'m", "'s", "'ve", "'re")]
    steps = [{"type": "Replace", "pattern": {"String": old}, "content": new} for old, new in swaps]
    spec["decoder"] = {"type": "Sequence", "decoders": [decoder, {"type": "Fuse"}, *steps]}
    return json.dumps(spec, ensure_ascii=False)

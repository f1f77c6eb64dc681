"""Where a document starts and ends: the one rule (docs/decisions/059-starts-of-documents.md).

    [start] t1 t2 … tn [end]

The inputs start, t1 … tn learn t1, t2 … end. The start token stands in the document and is seen by its attention; it
is never a target: in the stream it follows the end of another document (`shoal.data.windows` gives that input no
target), and in data with prompts its mask is 0. The start token is the tokenizer's own, else its end token. A data set
states the id in its index (`start_id`); one that states none was made before the rule, and has no start tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from shoal.errors import DataError

if TYPE_CHECKING:
    import numpy.typing as npt

NO_START = "none"  # as an option: documents as they were made before the rule
# The names that published tokenizers give the token after which a document is over, and the one before it.
END_OF_TEXT = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>")
START_OF_TEXT = ("<|begin_of_text|>", "<s>", "<bos>", "<|startoftext|>")

Array: TypeAlias = "npt.NDArray[Any]"


def begun(ids: Sequence[int], start_id: int | None) -> list[int]:
    """The beginning of a document, for a model to go on from. What begins with the start token gets no second one."""
    return list(ids) if start_id is None or ids[:1] == [start_id] else [start_id, *ids]


class Frame:
    """Puts start and end around documents. Marks that a text brings along (special tokens were asked for) are taken
    for ours: no document gets two."""

    def __init__(self, start_id: int | None, end_id: int, dtype: npt.DTypeLike) -> None:
        import numpy as np  # not for those who want words alone, such as `shoal show`

        self._start_id, self._end_id = start_id, end_id
        self._start = [] if start_id is None else [np.array([start_id], dtype)]
        self._end = [np.array([end_id], dtype)]

    def around(self, prompt: list[Array], text: list[Array]) -> tuple[list[Array], int, int]:
        """A whole document in pieces, its size, and how many tokens from its beginning are no targets where there is a
        mask: the start and the prompt. No piece is empty."""
        body = [*prompt, *text]
        size = sum(piece.size for piece in body)
        context = sum(piece.size for piece in prompt)
        start, end = self._start, self._end
        if body and start and body[0][0] == self._start_id:
            start = []
            context = max(context, 1)
        if text and text[-1][-1] == self._end_id and size > (self._start_id is not None and not start):
            end = []
        return [*start, *body, *end], size + len(start) + len(end), context + len(start)


def end_of(ids: Mapping[str, int], where: str, asked: str | int | None, config: Mapping[str, Any]) -> int:
    """The id that ends a document: as asked for, as `tokenizer_config.json` says, or by a usual name."""
    if asked is not None:
        return _named(ids, where, asked, "--eos")
    if (named := _token(config, "eos_token")) is not None:
        if named not in ids:
            raise DataError(
                f"{where} has no token '{named}', which its files name as eos_token; name another with --eos."
            )
        return ids[named]
    for name in END_OF_TEXT:
        if name in ids:
            return ids[name]
    raise DataError(
        f"{where} has none of the usual end-of-text tokens ({', '.join(END_OF_TEXT)}); "
        "name the token that ends a document with --eos."
    )


def start_of(
    ids: Mapping[str, int],
    where: str,
    asked: str | int | None,
    config: Mapping[str, Any] | None,
    template: Sequence[int],
    end_id: int,
) -> int | None:
    """The id that starts a document; None only if so asked.

    `template` has the ids that the tokenizer's own post-processor puts before a text, `config` is the
    tokenizer_config.json beside it (None: there is none). As in transformers, `add_bos_token` overrules the template.
    """
    if asked == NO_START:
        return None
    if asked is not None:
        return _named(ids, where, asked, "--start")
    bos = ids.get(_token(config or {}, "bos_token") or "")
    adds = (config or {}).get("add_bos_token")
    if adds is False:
        return end_id
    if adds is True and bos is not None:
        return bos
    if len(template) > 1:
        raise DataError(
            f"{where} puts {len(template)} tokens before every text ({', '.join(map(str, template))}), and Shoal knows "
            f"one start token; name one of its tokens with --start, or --start {NO_START}."
        )
    if template:
        return template[0]
    if config is not None:
        return end_id if bos is None else bos
    return next((ids[name] for name in START_OF_TEXT if name in ids), end_id)


def said(start_id: int | None, end_id: int) -> str:
    """In words, for people."""
    if start_id is None:
        return f"documents have no start token and end with {end_id}"
    return f"documents start with {start_id} and end with {end_id}"


def said_of_run(starts: Iterable[int | None]) -> str | None:
    """One line about the training data of a run; None where it is not known."""
    known = list(starts)
    if not known:
        return None
    if None in known:
        return "documents: no start token in data.train, so their first tokens are never learnt (`shoal data prepare`)"
    return f"documents: start with token {known[0]}"


def _named(ids: Mapping[str, int], where: str, asked: str | int, option: str) -> int:
    if isinstance(asked, int):
        return asked
    if asked not in ids:
        raise DataError(f"{where} has no token '{asked}', which {option} names; choose one of its special tokens.")
    return ids[asked]


def _token(config: Mapping[str, Any], key: str) -> str | None:
    """A token as tokenizer_config.json names it: by its text, or as an object that holds it."""
    token = config.get(key)
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None

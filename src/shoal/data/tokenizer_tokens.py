"""The tokens that the files of a folder name beside its vocabulary, in the order in which transformers adds them.

Order matters: a token that the vocabulary lacks gets the next free id, whatever id a file states for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shoal.data.tokenizer_library import MOST_ID, MOST_TOKEN_CHARS
from shoal.values import BadValue, flag, inside, items, shown, table, text, whole

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Library

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
MOST_ADDED = 1 << 18
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_EXTRA, _OLD_EXTRA = "extra_special_tokens", "additional_special_tokens"


@dataclass
class Tokens:
    """As transformers keeps them between reading the files and adding them."""

    listed: list[AddedToken] = field(default_factory=list)
    """With all their settings, by the ids that the files state."""
    roles: dict[str, str | AddedToken] = field(default_factory=dict)
    """The seven roles first; then those that the model has beside."""
    extra: list[str | AddedToken] = field(default_factory=list)

    def names(self) -> dict[str, str | None]:
        """Role → token."""
        return {role: _content(self.roles[role]) if role in self.roles else None for role in (*NAMED, *self.roles)}

    def are_all_in(self, spec: Mapping[str, Any]) -> bool:
        """Whether adding them to this tokenizer.json would change nothing."""
        have = {}
        for said in spec.get("added_tokens") or []:
            have[said["content"]] = repr(_token({key: value for key, value in said.items() if key != "id"}))
        roles = {_content(token) for token in self.roles.values()}
        listed = all(have.get(t.content) == repr(t) and (t.special or t.content not in roles) for t in self.listed)
        return listed and all(_content(token) in have for token in [*self.roles.values(), *self.extra])

    def add_to(self, library: Library, again: str = "") -> None:
        from tokenizers import AddedToken

        known = {token.content for token in library.get_added_tokens_decoder().values()}
        known |= {token.content for token in self.listed}
        new: list[str | AddedToken] = []
        for token in [*self.roles.values(), *self.extra]:
            # A name and a token with settings are two: both are added, and the later one's settings hold.
            if _content(token) not in known and token not in new:
                new.append(token)
        roles = {_content(token) for token in self.roles.values() if _content(token)}
        adding = []
        for token in [*self.listed, *new]:
            if isinstance(token, str):
                token = AddedToken(token, special=True)
            elif not token.special and token.content in roles:
                token.special = True
            adding.append(token)
        library.add_tokens(adding)
        special = dict.fromkeys(map(_content, [*self.roles.values(), *self.extra]))
        if again == "added":
            library.add_tokens([AddedToken(content, special=True) for content in special])
        elif again == "special":
            whole = [*self.roles.values(), *self.extra]
            library.add_special_tokens(
                [AddedToken(t, special=True, normalized=False) if isinstance(t, str) else t for t in whole]
            )


def gathered(
    config: Mapping[str, Any],
    special: Mapping[str, Any] | None,
    added: Mapping[str, Any] | None,
    spec: Mapping[str, Any] | None,
    defaults: Mapping[str, str | None],
    where: str,
) -> Tokens:
    """From tokenizer_config.json, special_tokens_map.json, added_tokens.json and tokenizer.json; `defaults` are those
    of the class. The second and third count only where the first has no `added_tokens_decoder`."""
    said = dict(config)
    if _OLD_EXTRA in said and not said.get(_EXTRA):
        said[_EXTRA] = said.pop(_OLD_EXTRA)
    own = {k: said.pop(k) for k in list(said) if k.endswith("_token") and k not in NAMED and isinstance(said[k], str)}
    if isinstance(said.get(_EXTRA), dict):
        own |= said.pop(_EXTRA)
    listed: dict[int, AddedToken] = {}
    if "added_tokens_decoder" in said:
        with inside(f"{where}/tokenizer_config.json: added_tokens_decoder"):
            for index, token in table(said["added_tokens_decoder"], MOST_ADDED).items():
                listed[_index(index)] = _token(token)
    else:
        with inside(f"{where}/special_tokens_map.json"):
            own |= _merged(said, special or {})
        with inside(f"{where}/added_tokens.json"):
            listed |= _of_added(said, added or {})
        with inside(f"{where}/tokenizer.json: added_tokens"):
            for token in [] if spec is None else items(spec.get("added_tokens") or [], MOST_ADDED):
                listed[_index(table(token, 100).get("id"))] = _token({k: v for k, v in token.items() if k != "id"})
    return _of_roles(said, own, listed, defaults, f"{where}/tokenizer_config.json")


def _merged(said: dict[str, Any], special: Mapping[str, Any]) -> dict[str, Any]:
    """Takes special_tokens_map.json into `said`; returns roles of the model's own that it names."""
    for key, value in special.items():
        with inside(key):
            if isinstance(value, dict) and key != _EXTRA:
                value = _token({**value, "special": True})
            elif isinstance(value, list) and key == _EXTRA:
                had = list(said.get(_EXTRA) or [])
                for one in value:
                    token = _token({**one, "special": True}) if isinstance(one, dict) else one
                    if all(_content(token) != _content(other) for other in had):
                        had.append(token)
                value = had
            said[key] = value
    return said.pop(_EXTRA) if isinstance(said.get(_EXTRA), dict) else {}


def _of_added(said: Mapping[str, Any], added: Mapping[str, Any]) -> dict[int, AddedToken]:
    from tokenizers import AddedToken

    special = {_content(said[role]) for role in NAMED if said.get(role)}
    special |= {_content(token) for token in said.get(_EXTRA) or []}
    listed = {}
    for content, index in table(added, MOST_ADDED).items():
        is_special = content in special
        listed[_index(index)] = AddedToken(
            text(content, MOST_TOKEN_CHARS), normalized=not is_special, special=is_special
        )
    return listed


def _of_roles(
    said: Mapping[str, Any],
    own: Mapping[str, Any],
    listed: Mapping[int, AddedToken],
    defaults: Mapping[str, str | None],
    where: str,
) -> Tokens:
    by_name = {token.content: token for _, token in listed.items()}
    roles: dict[str, str | AddedToken] = {}
    with inside(where):
        for role in NAMED:
            value = said[role] if role in said else defaults.get(role)
            if value is not None:
                with inside(role):
                    token = _either(value)
                roles[role] = by_name.get(_content(token), token) if role in said else token
        found = {k: v for k, v in said.items() if k.endswith("_token") and k not in NAMED and _is_token(v)}
        for role, value in {**found, **own}.items():
            with inside(role):
                roles[role] = _either(value)
        extra = said.get(_EXTRA) if _EXTRA in said else said.get(_OLD_EXTRA)
        with inside(_EXTRA):
            return Tokens(
                [listed[i] for i in sorted(listed)], roles, [_either(t) for t in items(extra or [], MOST_ADDED)]
            )


def _is_token(value: object) -> bool:
    from tokenizers import AddedToken

    return isinstance(value, str | AddedToken) or (isinstance(value, dict) and value.get("__type") == "AddedToken")


def _either(value: Any) -> str | AddedToken:
    from tokenizers import AddedToken

    if isinstance(value, AddedToken):
        return value
    return _token(value) if isinstance(value, dict) else text(value, MOST_TOKEN_CHARS)


def _token(said: Any) -> AddedToken:
    from tokenizers import AddedToken

    token = {key: value for key, value in table(said, 100).items() if key != "__type"}
    content = text(token.pop("content", None), MOST_TOKEN_CHARS)
    if unknown := token.keys() - set(_FLAGS):
        raise BadValue(f"'{shown(min(unknown))}' is no setting of a token", shown(content))
    for key, value in token.items():
        with inside(f"{shown(content)}: {key}"):
            flag(value)
    return AddedToken(content, **token)


def _index(said: Any) -> int:
    if isinstance(said, str) and said.isdecimal() and len(said) < 10:
        said = int(said)
    return whole(said, MOST_ID)


def _content(token: Any) -> str:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else str(getattr(token, "content", token))

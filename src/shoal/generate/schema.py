"""A JSON schema as the grammar compiler keeps to it: every document it then allows is valid.

xgrammar takes any schema and leaves out what it does not know: `not`, `allOf` of several, lengths beside a pattern, a
required field without a schema. So each schema is written anew with what it does keep to. That may be narrower than
what was asked, never wider; what cannot be said so is refused by name (docs/decisions/091-forms-of-answers.md).
"""

from __future__ import annotations

import json

from shoal import values
from shoal.generate.pattern import as_rule
from shoal.generate.schema_values import (
    IS,
    LENGTHS,
    MOST_PARTS,
    OF_TYPE,
    Schema,
    alone,
    const,
    enum,
    number,
    span,
    types,
)
from shoal.values import BadValue, inside, shown

MOST_BYTES = 256 << 10
# They say something to people, and hold no document to anything.
SAID = frozenset(
    {
        *("title", "description", "default", "examples", "example", "$schema", "$id", "$comment", "$defs"),
        *("definitions", "deprecated", "readOnly", "writeOnly", "contentMediaType", "contentEncoding"),
    }
)
FORMATS = frozenset({"date", "time", "date-time", "email", "uuid", "ipv4", "ipv6"})
_ALL = frozenset().union(*OF_TYPE.values())


def narrowed(text: bytes) -> tuple[str, list[str]]:
    """The schema as the compiler is given it, and a rule for each of its patterns (`mark_of` stands in its place).
    BadValue: what it asks for cannot be kept to."""
    root = values.read_json(text, most_parts=MOST_PARTS, most_bytes=MOST_BYTES)
    gate = _Gate(root)
    made = gate.schema(root)
    gate.follow()
    gate.refuse_endless(made)
    return json.dumps({**made, "$defs": gate.made} if gate.made else made, ensure_ascii=False), gate.patterns


def mark_of(pattern: int) -> str:
    return f"shoalpattern{pattern}"


class _Gate:
    """The parts that references point to are read when they are first met."""

    def __init__(self, root: object) -> None:
        self.root = root
        self.made: dict[str, Schema] = {}
        self.patterns: list[str] = []
        self._names: dict[str, str] = {}  # pointer → its name in `made`
        self._left: list[str] = []

    def follow(self) -> None:
        while self._left:
            pointer = self._left.pop()
            with inside(shown(pointer)):
                self.made[self._names[pointer]] = self.schema(self._at(pointer))

    def schema(self, said: object) -> Schema:
        if said is True or said == {}:
            return {}
        if said is False:
            raise BadValue("false, which no document is")
        rest = {key: value for key, value in values.fields_of(said).items() if key not in SAID}
        for key, read in (("$ref", self._ref), ("enum", enum), ("const", const)):
            if key in rest:
                return read(rest)
        for key in ("anyOf", "oneOf", "allOf"):
            if key in rest:
                return self._several(key, rest)
        if unknown := sorted(rest.keys() - _ALL - {"type"}):
            raise BadValue("it is not supported; leave it out", shown(unknown[0]))
        kinds = types(rest)
        if not kinds:
            return {}
        made = [self._of_type(kind, rest) for kind in kinds]
        return made[0] if len(made) == 1 else {"anyOf": made}

    def refuse_endless(self, root: Schema) -> None:
        """A part of which each document has another one in it, as in a list whose every item needs an item."""
        ends: set[str] = set()
        while True:
            more = {name for name, made in self.made.items() if name not in ends and _ends(made, ends)}
            if not more:
                break
            ends |= more
        if not _ends(root, ends) or ends != self.made.keys():
            raise BadValue("it refers to itself so that no document ever ends")
        self._refuse_bare_loops()

    def _refuse_bare_loops(self) -> None:
        """A reference that comes back to itself before anything is written."""
        left = {name: set(_bare(made)) for name, made in self.made.items()}
        while free := [name for name, needs in left.items() if not needs & left.keys()]:
            for name in free:
                del left[name]
        if left:
            raise BadValue("it refers to itself with nothing in between")

    def _ref(self, rest: Schema) -> Schema:
        alone(rest, "$ref")
        pointer = values.short(rest["$ref"])
        if pointer not in self._names:
            with inside("$ref"):
                self._at(pointer)
            self._names[pointer] = f"d{len(self._names)}"
            self._left.append(pointer)
        return {"$ref": f"#/$defs/{self._names[pointer]}"}

    def _at(self, pointer: str) -> object:
        """What a reference points to."""
        if pointer != "#" and not pointer.startswith("#/"):
            raise BadValue(f"'{shown(pointer)}' is not in the schema itself; write it there")
        here = self.root
        for step in pointer[2:].split("/") if pointer != "#" else []:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(here, list) and step.isdecimal() and int(step) < len(here):
                here = here[int(step)]
            elif isinstance(here, dict) and step in here:
                here = here[step]
            else:
                raise BadValue(f"'{shown(pointer)}' points to nothing")
        return here

    def _several(self, key: str, rest: Schema) -> Schema:
        beside = {name: value for name, value in rest.items() if name not in (key, "type")}
        if beside:
            raise BadValue(f"it is not supported beside {shown(min(beside))}; write one into the other", key)
        with inside(key):
            said = values.items(rest[key], 1000)
            if not said:
                raise BadValue("an empty list")
            if "type" in rest:  # pydantic and others write it beside
                said = [self._with_type(one, rest["type"]) for one in said]
            if key == "allOf" and len(said) > 1:
                raise BadValue("it is not supported with more than one part; write them as one")
            made = [self.schema(one) for one in said]
            if key == "oneOf" and not _apart(made):
                raise BadValue("parts that one document may fit both of; write anyOf if that is meant")
        return made[0] if len(made) == 1 else {"anyOf": made}

    def _with_type(self, said: object, kind: object) -> object:
        if isinstance(said, dict) and said.get("type", kind) == kind and "$ref" not in said:
            return {**said, "type": kind}
        raise BadValue("type beside it says another thing than one of its parts; write it into the parts")

    def _of_type(self, kind: str, rest: Schema) -> Schema:
        if kind == "string":
            return self._string(rest)
        if kind in ("number", "integer"):
            return number(kind, rest)
        if kind == "array":
            return self._array(rest)
        return self._object(rest) if kind == "object" else {"type": kind}

    def _string(self, rest: Schema) -> Schema:
        made: Schema = {"type": "string"}
        least, most = span(rest, *LENGTHS)
        if "pattern" in rest:
            if least or most is not None:
                raise BadValue("it is not supported beside a length; write the length into it, as in {1,9}", "pattern")
            with inside("pattern"):
                self.patterns.append(as_rule(values.text(rest["pattern"], MOST_BYTES), within_json=True))
            return made | {"pattern": mark_of(len(self.patterns) - 1)}
        form = rest.get("format")
        if isinstance(form, str) and form in FORMATS and not least and most is None:
            return made | {"format": form}
        return made | ({"minLength": least} if least else {}) | ({} if most is None else {"maxLength": most})

    def _array(self, rest: Schema) -> Schema:
        if rest.get("uniqueItems"):
            raise BadValue("it is not supported; leave it out", "uniqueItems")
        least, most = span(rest, "minItems", "maxItems")
        made: Schema = {"type": "array"}
        first = []
        if "prefixItems" in rest:
            with inside("prefixItems"):
                first = [self.schema(one) for one in values.items(rest["prefixItems"], 1000)]
        if most is not None and most < len(first):
            first = first[:most]
        if isinstance(rest.get("items"), list):
            raise BadValue("a list of schemas is prefixItems", "items")
        open_ended = rest.get("items", True) is not False and (most is None or most > len(first))
        if first:
            made["prefixItems"] = first
        if open_ended:
            with inside("items"):
                made["items"] = self.schema(rest.get("items", True))
        elif not first:
            most = 0
            made["items"] = {"type": "null"}
        else:
            made["items"] = False
            most = None if most is None or most >= len(first) else most
        if least > len(first) and not open_ended:
            raise BadValue(f"{least} are more than there can be", "minItems")
        return made | ({"minItems": least} if least else {}) | ({} if most is None else {"maxItems": most})

    def _object(self, rest: Schema) -> Schema:
        """What may come beside the named fields is left out: a name could come that is one of them."""
        said = values.table(rest.get("properties", {}), MOST_PARTS)
        free = rest.get("additionalProperties", True)
        required = [values.text(name, 4096) for name in values.items(rest.get("required", []), MOST_PARTS)]
        least, most = span(rest, "minProperties", "maxProperties")
        if (unknown := [name for name in required if name not in said]) and free is False:
            raise BadValue(f"'{shown(unknown[0])}' is required, and is no field", "required")
        said = {**said, **dict.fromkeys(unknown, free)}
        if not said:
            if least > 1:
                raise BadValue("it is not supported without properties: a name may come twice", "minProperties")
            made: Schema = {"type": "object", "additionalProperties": False}
            if free is not False and most != 0:
                with inside("additionalProperties"):
                    made["additionalProperties"] = self.schema(free)
            elif least:
                raise BadValue(f"{least} are more than there can be", "minProperties")
        else:
            fields = {}
            for name, value in said.items():
                if value is False and name not in required:
                    continue
                with inside("properties"), inside(shown(name)):
                    fields[name] = self.schema(value)
            made = {"type": "object", "properties": fields, "additionalProperties": False}
            made["required"] = list(dict.fromkeys(required))
            if least > len(fields) or (most is not None and most < len(made["required"])):
                raise BadValue("a number of fields that cannot be", "minProperties")
        return made | ({"minProperties": least} if least else {}) | ({} if most is None else {"maxProperties": most})


def _apart(made: list[Schema]) -> bool:
    """Whether no document fits two of them: by their types, their values, or a field whose value tells."""
    return all(_differ(one, other) for i, one in enumerate(made) for other in made[:i])


def _differ(one: Schema, other: Schema) -> bool:
    first, second = one.get("enum"), other.get("enum")
    if first is not None and second is not None:
        return not any(a == b for a in first for b in second)
    if first is not None or second is not None:
        value, schema = (first, other) if first is not None else (second, one)
        return "type" in schema and not any(IS[schema["type"]](item) for item in value or ())
    if "type" not in one or "type" not in other:
        return False
    if one["type"] != other["type"]:
        return {one["type"], other["type"]} != {"integer", "number"}
    return any(
        "enum" in left and "enum" in right and _differ(left, right)
        for name in set(one.get("required", ())) & set(other.get("required", ()))
        for left, right in [(one["properties"][name], other["properties"][name])]
    )


def _ends(made: Schema, known: set[str]) -> bool:
    """Whether there is a document, those parts being known to have one."""
    if "$ref" in made:
        return made["$ref"].removeprefix("#/$defs/") in known
    if "anyOf" in made:
        return any(_ends(one, known) for one in made["anyOf"])
    if made.get("type") == "array":
        least, first = made.get("minItems", 0), made.get("prefixItems", [])
        rest = least <= len(first) or _ends(made.get("items") or {}, known)
        return rest and all(_ends(one, known) for one in first[:least])
    if made.get("type") == "object":
        return all(_ends(made["properties"][name], known) for name in made.get("required", ()))
    return True


def _bare(made: Schema) -> list[str]:
    """The parts that it refers to with nothing written before."""
    if "$ref" in made:
        return [made["$ref"].removeprefix("#/$defs/")]
    return [name for one in made.get("anyOf", ()) for name in _bare(one)]

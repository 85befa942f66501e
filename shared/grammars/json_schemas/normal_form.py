"""Writes JSON schemas in one normal form, so that an engine meets each meaning in one spelling.

Annotations are left out, and so are keywords that no draft defines: a schema cannot set an engine's options
(`x-guidance`). References go to `$defs` of the root, whether `$id`, `$anchor` or a pointer named the schema. Spellings
of older drafts become the spelling of 2020-12.
"""

import re
from typing import Any
from urllib.parse import unquote, urljoin

from blockyard.shared.grammars.format_patterns import FORMATS
from blockyard.shared.grammars.interface import GrammarError
from blockyard.shared.grammars.json_schemas.keywords import (
    APPLICATORS,
    ASSERTIONS,
    DEFINITIONS,
    NAMED_SCHEMAS,
    ONE_SCHEMA,
    SCHEMA_LISTS,
    Schema,
    checked,
    kind_of,
)
from blockyard.shared.grammars.json_schemas.patterns import with_whole_characters

MAX_PARTS = 50_000  # schemas within one, as in llguidance; a definition counts once
_ANYTHING: tuple[Any, ...] = (True, {})
# with these values a keyword says nothing
_SAYS_NOTHING: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("items", "propertyNames", "unevaluatedProperties", "unevaluatedItems"), _ANYTHING),
    **dict.fromkeys(("minLength", "minItems", "minProperties"), (0,)),
    **dict.fromkeys(("required", "prefixItems"), ([],)),
    **dict.fromkeys(("patternProperties", "dependentSchemas", "dependentRequired", "dependencies"), ({},)),
    "uniqueItems": (False,),
}
# formats with a narrower one that engines know
_NARROWER = {"iri": "uri", "iri-reference": "uri-reference", "idn-email": "email"}


def normal_schema(schema: object) -> Schema:
    """The normal form of a JSON schema, which shares nothing with it. Raises GrammarError if it is no schema."""
    try:
        return _Normalizer(schema).whole()
    except RecursionError as e:
        raise GrammarError("the JSON schema is nested too deeply") from e


class _Normalizer:
    def __init__(self, root: object) -> None:
        self._root = root
        self._targets = _Targets(root)
        self._names: dict[tuple[int, str], str] = {}  # of definitions, by the schema's identity and base
        self._taken: set[str] = set()
        self._num_same = 0
        self._waiting: list[tuple[str, object, str]] = []  # definitions to be written, with their bases
        self._left = MAX_PARTS

    def whole(self) -> Schema:
        schema = self._part(self._root, "")
        definitions: dict[str, Schema] = {}
        while self._waiting:
            name, part, base = self._waiting.pop()
            definitions[name] = self._part(part, base)
        return {**schema, "$defs": definitions} if definitions and isinstance(schema, dict) else schema

    def _part(self, part: object, base: str) -> Schema:
        self._left -= 1
        if self._left < 0:
            raise GrammarError(f"the JSON schema has more than {MAX_PARTS} schemas in it")
        if isinstance(part, bool):
            return part
        if not isinstance(part, dict):
            raise GrammarError(f"a JSON schema is an object or a boolean, not {kind_of(part)}")
        base = self._targets.base_of(part, base)
        return _simplified({key: self._value(key, value, base) for key, value in part.items() if key in ASSERTIONS})

    def _value(self, keyword: str, value: Any, base: str) -> Any:
        if keyword == "items" and isinstance(value, list):
            return [self._part(one, base) for one in value]
        if keyword in ONE_SCHEMA:
            return self._part(value, base)
        if keyword in SCHEMA_LISTS:
            if not isinstance(value, list) or not (value or keyword == "prefixItems"):
                raise GrammarError(f"{keyword} of a JSON schema is a list of schemas")
            return [self._part(one, base) for one in value]
        if keyword in NAMED_SCHEMAS:
            if not isinstance(value, dict):
                raise GrammarError(f"{keyword} of a JSON schema is an object of schemas")
            spelled = with_whole_characters if keyword == "patternProperties" else str
            return {spelled(name): self._part(one, base) for name, one in value.items()}
        if keyword.startswith("exclusive") and isinstance(value, bool):
            return value  # of draft 4
        value = checked(keyword, value)
        if keyword == "pattern":
            return with_whole_characters(value)
        return f"#/$defs/{self._name(value, base)}" if keyword == "$ref" else value

    def _name(self, reference: str, base: str) -> str:
        """The name of the definition that stands for a reference's target."""
        part, base = self._targets.find(reference, base)
        known = self._names.get((id(part), base))
        if known is not None:
            return known
        name = own = re.sub("[^A-Za-z0-9_]", "_", reference.rpartition("/")[2])[:60]
        while name in self._taken or not name:
            self._num_same += 1
            name = f"{own}_{self._num_same}"
        self._taken.add(name)
        self._names[id(part), base] = name
        self._waiting.append((name, part, base))
        return name


class _Targets:
    """The targets of references in one document: pointers, anchors, and the URIs of the schemas in it."""

    def __init__(self, root: object) -> None:
        draft = re.search("draft-0([3-7])", str(root.get("$schema"))) if isinstance(root, dict) else None
        self._draft = int(draft[1]) if draft else 2020
        # by URI: the schema, and the base around it
        self._resources: dict[str, tuple[object, str]] = {"": (root, "")}
        self._anchors: dict[tuple[str, str], tuple[object, str]] = {}
        waiting = [(root, "")]
        while waiting:
            part, around = waiting.pop()
            if not isinstance(part, dict):
                continue
            base = self.base_of(part, around)
            self._resources.setdefault(base, (part, around))
            names = (part.get("$anchor"), part.get("$dynamicAnchor"), self._own_id(part).partition("#")[2])
            for name in names:
                if isinstance(name, str):
                    self._anchors.setdefault((base, name), (part, around))
            waiting += [(one, base) for one in _inner(part)]

    def base_of(self, part: dict[str, Any], around: str) -> str:
        """The URI that references in `part` start from."""
        own = self._own_id(part).partition("#")[0]
        return _joined(around, own) if own else around

    def find(self, reference: str, base: str) -> tuple[object, str]:
        """The schema that a reference names, and the base around it. Raises GrammarError if the document has none."""
        location, _, fragment = reference.partition("#")
        uri, fragment = _joined(base, location) if location else base, unquote(fragment)
        is_pointer = not fragment or fragment.startswith("/")
        found = self._resources.get(uri) if is_pointer else self._anchors.get((uri, fragment))
        if found is None:
            raise _unknown(reference)
        part, around = found
        for step in fragment.split("/")[1:] if is_pointer else ():
            if isinstance(part, dict):
                around = self.base_of(part, around)
            part = _stepped(part, step.replace("~1", "/").replace("~0", "~"), reference)
        return part, around

    def _own_id(self, part: dict[str, Any]) -> str:
        own = part.get("id" if self._draft <= 4 else "$id")
        is_ignored = self._draft <= 7 and "$ref" in part
        return own if isinstance(own, str) and not is_ignored else ""


def _joined(base: str, location: str) -> str:
    try:
        return urljoin(base, location)
    except ValueError as e:
        raise GrammarError(f"the JSON schema has an invalid URI: {e}") from e


def _inner(part: dict[str, Any]) -> list[object]:
    """The schemas directly in a schema that is not in normal form."""
    inner: list[object] = [part.get(keyword) for keyword in ONE_SCHEMA]
    for keyword in (*SCHEMA_LISTS, "items"):
        if isinstance(listed := part.get(keyword), list):
            inner += listed
    for keyword in (*NAMED_SCHEMAS, *DEFINITIONS):
        if isinstance(named := part.get(keyword), dict):
            inner += named.values()
    return inner


def _stepped(part: object, step: str, reference: str) -> object:
    if isinstance(part, dict) and step in part:
        return part[step]
    if isinstance(part, list) and step.isdecimal() and int(step) < len(part):
        return part[int(step)]
    raise _unknown(reference)


def _unknown(reference: str) -> GrammarError:
    return GrammarError(f"the JSON schema refers to {reference[:200]}, which it does not define")


def _simplified(part: dict[str, Any]) -> Schema:
    """A schema in the spelling of 2020-12. The schemas in it are in normal form. Changes `part`."""
    _spell_bounds(part)
    _spell_items(part)
    _spell_unevaluated(part)
    for keyword, values in _SAYS_NOTHING.items():
        # False is no 0, and True no 1
        if keyword in part and any(part[keyword] == value and type(part[keyword]) is type(value) for value in values):
            del part[keyword]
    if "format" in part:
        part["format"] = _NARROWER.get(part["format"], part["format"])
    types = part.get("type", "string")
    if part.get("format", "date") not in FORMATS or "string" not in (types if isinstance(types, list) else [types]):
        part.pop("format", None)
    only: list[Schema] = next((part[key] for key in ("allOf", "anyOf", "oneOf") if key in part), [])
    return only[0] if len(only) == len(part) == 1 else part


def _spell_bounds(part: dict[str, Any]) -> None:
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if isinstance(part.get(exclusive), bool) and part.pop(exclusive) and bound in part:
            part[exclusive] = part.pop(bound)


def _spell_items(part: dict[str, Any]) -> None:
    others = part.pop("additionalItems", None)
    if isinstance(part.get("items"), list):
        if "prefixItems" in part:
            raise GrammarError("items of a JSON schema is no list beside prefixItems")
        part["prefixItems"] = part.pop("items")
        if others is not None:
            part["items"] = others


def _spell_unevaluated(part: dict[str, Any]) -> None:
    """`unevaluated...` is `additional...` where no other schema concerns the same value."""
    if part.keys() & APPLICATORS:
        return
    if "unevaluatedProperties" in part:
        part.setdefault("additionalProperties", part.pop("unevaluatedProperties"))
    if "unevaluatedItems" in part and "contains" not in part:
        part.setdefault("items", part.pop("unevaluatedItems"))

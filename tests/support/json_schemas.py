"""JSON schemas for tests of structured output: random ones, chosen ones that use each keyword, and their validation."""

import datetime
import functools
import ipaddress
import json
import random
import re
from collections.abc import Collection, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import jsonschema

Schema = dict[str, Any]

CHOSEN_FILE = Path(__file__).with_name("chosen_schemas.json")
PATTERNS = ("^[a-z]{1,6}$", "^(ab|cd)+$", "^[A-Z][a-z]*$", "x", "^a", "[0-9]$", r"^\d{3}-\d{4}$", "^(é|東){2}$")
FORMATS = ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
NAMES = ("a", "b", "name", "size", "x-y", "näme", 'q"t', "")
MOST_CHARS = 24  # of strings in `bounded` schemas
LONG_FORMATS = ("email", "hostname", "uri", "duration")  # of any length
VALUES: tuple[Any, ...] = ("red", "", 'a"b', "ü", 0, 7, -3, 2.5, True, False, None, [], [1], {}, {"a": 1})


def chosen_schemas() -> dict[str, Schema]:
    """By name. Together they use each keyword that an engine supports, alone and beside others."""
    schemas: dict[str, Schema] = json.loads(CHOSEN_FILE.read_text("utf-8"))
    return schemas


def random_schema(seed: int) -> Schema:
    """A schema with each supported keyword at random. A few of them allow no value at all."""
    return _Writer(random.Random(seed)).whole()


def bounded(schema: Any) -> Any:
    """The schema with a most for the length of its values, so that a model which was never trained on it ends them."""
    if isinstance(schema, bool):
        return {"type": "string", "maxLength": MOST_CHARS} if schema else schema
    changed: Schema = dict(schema)
    names = schema.get("type", [])
    kinds = {names} if isinstance(names, str) else set(names)
    if "string" in kinds and schema.get("format", "uri") in LONG_FORMATS:
        changed.setdefault("maxLength", max(MOST_CHARS, schema.get("minLength", 0)))
    if "array" in kinds:
        changed.setdefault("maxItems", max(2, schema.get("minItems", 0)))
        changed.setdefault("items", {"type": "boolean"})
    if "object" in kinds:
        changed.setdefault("additionalProperties", False)
    if kinds & {"number", "integer"} and "multipleOf" not in schema:
        if not {"maximum", "exclusiveMaximum"} & schema.keys():
            changed["maximum"] = max(999, 1000 + schema.get("minimum", schema.get("exclusiveMinimum", 0)))
        if not {"minimum", "exclusiveMinimum"} & schema.keys():
            changed["minimum"] = min(-999, schema.get("maximum", schema.get("exclusiveMaximum", 0)) - 1000)
    for keyword in ("properties", "patternProperties", "$defs"):
        if keyword in schema:
            changed[keyword] = {name: bounded(part) for name, part in schema[keyword].items()}
    for keyword in ("anyOf", "oneOf", "allOf", "prefixItems"):
        if keyword in schema:
            changed[keyword] = [bounded(part) for part in schema[keyword]]
    for keyword in ("items", "additionalProperties"):
        if keyword in schema:
            changed[keyword] = bounded(schema[keyword])
    return changed


def with_keywords(schema: Any, names: Collection[str]) -> Any:
    """The schema without keywords that are not in `names`; schemas that held others become `true`."""
    if not isinstance(schema, dict):
        return schema
    kept: Schema = {}
    for keyword, value in schema.items():
        if keyword not in names:
            continue
        if keyword in ("properties", "patternProperties", "$defs"):
            kept[keyword] = {name: with_keywords(part, names) for name, part in value.items()}
        elif keyword in ("anyOf", "oneOf", "allOf", "prefixItems"):
            kept[keyword] = [with_keywords(part, names) for part in value]
        else:
            kept[keyword] = with_keywords(value, names) if keyword in ("items", "additionalProperties") else value
    return kept


class _Writer:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._defs: dict[str, Schema] = {}

    def whole(self) -> Schema:
        rng = self._rng
        for index in range(rng.choice((0, 0, 1, 2))):
            self._defs[f"d{index}"] = self._schema(1, refs=False)
        schema = self._object(3) if rng.random() < 0.7 else self._schema(3)
        return {**schema, "$defs": self._defs} if self._defs else schema

    def _schema(self, depth: int, refs: bool = True) -> Schema:
        rng = self._rng
        kinds = [self._string, self._number, self._value, self._plain]
        if depth:
            kinds += [self._object, self._object, self._array, self._array, self._any_of, self._one_of, self._all_of]
        if refs and self._defs:
            kinds += [self._ref, self._ref]
        return rng.choice(kinds)(depth - 1)

    def _maybe(self, share: float = 0.4) -> bool:
        return self._rng.random() < share

    def _plain(self, depth: int) -> Schema:
        names = self._rng.sample(("boolean", "null", "integer", "number", "string"), self._rng.choice((1, 1, 2)))
        return {"type": names[0] if len(names) == 1 else names}

    def _value(self, depth: int) -> Schema:
        rng = self._rng
        if self._maybe():
            return {"const": rng.choice(VALUES)}
        schema: Schema = {"enum": rng.sample(VALUES, rng.randint(1, 5))}
        if self._maybe(0.3):
            schema["type"] = _type_of(schema["enum"][0])
        return schema

    def _string(self, depth: int) -> Schema:
        rng = self._rng
        schema: Schema = {"type": "string"}
        match rng.randrange(4):
            case 0:
                schema["pattern"] = rng.choice(PATTERNS)
            case 1:
                schema["format"] = rng.choice(FORMATS)
        if "format" not in schema or self._maybe(0.1):
            if self._maybe():
                schema["minLength"] = rng.randint(0, 5)
            if self._maybe(0.6):
                schema["maxLength"] = schema.get("minLength", 0) + rng.randint(0, 8)
        return schema

    def _number(self, depth: int) -> Schema:
        rng = self._rng
        whole = self._maybe(0.5)
        schema: Schema = {"type": "integer" if whole else "number"}
        low = rng.randint(-200, 200) if whole or self._maybe() else rng.randint(-2000, 2000) / 100
        if self._maybe():
            schema[rng.choice(("minimum", "exclusiveMinimum"))] = low
        if self._maybe():
            schema[rng.choice(("maximum", "exclusiveMaximum"))] = low + rng.choice((3, 10, 777))
        if self._maybe(0.25):
            schema["multipleOf"] = rng.choice((2, 3, 5, 10)) if whole else rng.choice((0.5, 0.25, 1, 0.1))
        return schema

    def _array(self, depth: int) -> Schema:
        rng = self._rng
        schema: Schema = {"type": "array"}
        if self._maybe(0.3):
            schema["prefixItems"] = [self._schema(depth) for _ in range(rng.randint(1, 3))]
        if self._maybe(0.8):
            schema["items"] = self._schema(depth) if self._maybe(0.85) else rng.choice((False, True))
        most = len(schema.get("prefixItems", [])) if schema.get("items") is False else 4
        if self._maybe():
            schema["minItems"] = rng.randint(0, min(most, 3))
        if self._maybe(0.6):
            schema["maxItems"] = rng.randint(schema.get("minItems", 0), 4)
        if self._maybe(0.08):
            schema["uniqueItems"] = True
        return schema

    def _object(self, depth: int) -> Schema:
        rng = self._rng
        names = rng.sample(NAMES, rng.randint(0, 4))
        schema: Schema = {"type": "object", "properties": {name: self._schema(depth) for name in names}}
        required = [name for name in names if self._maybe(0.6)]
        if required or self._maybe():
            schema["required"] = required
        if self._maybe(0.15):
            schema["patternProperties"] = {rng.choice(("^x_", "^[0-9]{2}$")): self._schema(depth)}
        if self._maybe(0.6):
            schema["additionalProperties"] = False if self._maybe(0.7) else self._schema(depth)
        if self._maybe(0.1):
            schema["minProperties"] = rng.randint(0, max(len(names), 1))
        if self._maybe(0.1):
            schema["maxProperties"] = rng.randint(len(required), max(len(names), 1))
        return schema

    def _any_of(self, depth: int) -> Schema:
        schema: Schema = {"anyOf": [self._schema(depth) for _ in range(self._rng.randint(1, 3))]}
        return schema | self._beside()

    def _one_of(self, depth: int) -> Schema:
        makers = self._rng.sample((self._string, self._number, self._object, self._value, self._array), 2)
        return {"oneOf": [maker(depth) for maker in makers]} | self._beside()

    def _all_of(self, depth: int) -> Schema:
        maker = self._rng.choice((self._string, self._number, self._object, self._array))
        return {"allOf": [maker(depth) for _ in range(self._rng.randint(1, 2))]} | self._beside()

    def _ref(self, depth: int) -> Schema:
        return {"$ref": f"#/$defs/{self._rng.choice(sorted(self._defs))}"} | self._beside()

    def _beside(self) -> Schema:
        """A keyword beside one that holds other schemas; mostly none."""
        beside = ({"type": "string"}, {"maxLength": 4}, {"minimum": 5}, {"description": "x"}, {"maxItems": 1})
        return self._rng.choice(beside) if self._maybe(0.15) else {}


def _type_of(value: object) -> str:
    names = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    return names.get(type(value), "null")


@functools.cache
def format_checker() -> jsonschema.FormatChecker:
    """jsonschema's own formats, and those for which it needs further packages."""
    checker = jsonschema.FormatChecker(("email", "ipv4", "ipv6", "regex", "uuid", "date"))
    for name, check in _CHECKS.items():
        checker.checks(name, raises=ValueError)(functools.partial(_if_text, check))
    return checker


def validate(text: str, schema: Schema) -> None:
    """Raises ValueError for text that is no JSON (NaN, control characters) or does not validate, formats included."""
    try:
        value = json.loads(text, parse_constant=_no_number)
        _VALIDATOR(schema, format_checker=format_checker()).validate(value)
    except jsonschema.ValidationError as e:
        raise ValueError(e.message) from e


def _is_multiple(
    validator: object, factor: float, value: object, schema: object
) -> Iterator[jsonschema.ValidationError]:
    """jsonschema divides binary fractions: to it -144.6 is no multiple of 0.1."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and Fraction(str(value)) % Fraction(str(factor)):
        yield jsonschema.ValidationError(f"{value} is no multiple of {factor}")


_VALIDATOR = jsonschema.validators.extend(jsonschema.Draft202012Validator, {"multipleOf": _is_multiple})


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def _if_text(check: Any, value: object) -> bool:
    return not isinstance(value, str) or bool(check(value))


_TIME = re.compile(r"([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)", re.IGNORECASE)
_DURATION = re.compile(
    r"P(?!$)((\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+S)?)?|\d+W)",
)
_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?")
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:([A-Za-z0-9\-._~:/?#\[\]@!$&'()*+,;=]|%[0-9A-Fa-f]{2})*")


def _is_date_time(text: str) -> bool:
    date, time = text[:10], text[11:]
    datetime.date.fromisoformat(date)
    return text[10:11] in ("T", "t") and bool(_TIME.fullmatch(time))


def _is_host(text: str) -> bool:
    return 0 < len(text) <= 253 and all(_LABEL.fullmatch(label) for label in text.split("."))


def _is_uri(text: str) -> bool:
    host = re.match(r"[^:]*://\[([^\]]*)\]", text)
    if host is not None and not host[1].lower().startswith("v"):
        ipaddress.IPv6Address(host[1])
    return bool(_URI.fullmatch(text))


_CHECKS = {
    "time": lambda text: bool(_TIME.fullmatch(text)),
    "date-time": _is_date_time,
    "duration": lambda text: bool(_DURATION.fullmatch(text)),
    "hostname": _is_host,
    "uri": _is_uri,
}

"""Keywords of JSON schemas, of all drafts: the assertions among them, and the values that each may have."""

from collections.abc import Callable, Iterator
from typing import Any

from blockyard.shared.grammars.interface import GrammarError


def keywords(names: str) -> frozenset[str]:
    """A set of keywords, from their names with spaces between."""
    return frozenset(names.split())


Schema = dict[str, Any] | bool

# where a schema holds other schemas
ONE_SCHEMA = keywords(
    "additionalProperties unevaluatedProperties propertyNames unevaluatedItems contains not if then else"
)
ONE_SCHEMA |= keywords("items additionalItems")
SCHEMA_LISTS = keywords("anyOf oneOf allOf prefixItems")
NAMED_SCHEMAS = keywords("properties patternProperties dependentSchemas")
DEFINITIONS = ("$defs", "definitions")
# they make what schemas beside them allow a part of an answer evaluated
APPLICATORS = keywords(
    "$ref $dynamicRef $recursiveRef allOf anyOf oneOf not if then else dependentSchemas dependencies"
)

_COUNTS = keywords("minLength maxLength minItems maxItems minProperties maxProperties minContains maxContains")
_NUMBERS = keywords("minimum maximum exclusiveMinimum exclusiveMaximum multipleOf")
_TEXTS = keywords("pattern format $ref")
# honoured by no engine
_OTHERS = keywords(
    "dependentRequired dependencies propertyDependencies divisibleBy extends disallow $dynamicRef $recursiveRef"
)
# These alone say which values are valid. All others annotate, also keywords that no draft defines.
ASSERTIONS = ONE_SCHEMA | SCHEMA_LISTS | NAMED_SCHEMAS | _COUNTS | _NUMBERS | _TEXTS | _OTHERS
ASSERTIONS |= keywords("type enum const required uniqueItems")

IS_TYPE: dict[str, Callable[[object], bool]] = {
    "string": lambda value: isinstance(value, str),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "integer": lambda value: not isinstance(value, bool) and isinstance(value, int | float) and value == int(value),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}


def has_type(value: object, name: str) -> bool:
    return IS_TYPE[name](value)


def checked(keyword: str, value: Any) -> Any:
    """The value of a keyword that holds no schemas; counts as int. Raises GrammarError for one of a wrong kind."""
    if keyword in _COUNTS:
        if not has_type(value, "integer") or value < 0:
            raise _wrong(keyword, "a whole number that is not negative", value)
        return int(value)
    if keyword in _NUMBERS and not has_type(value, "number"):
        raise _wrong(keyword, "a number", value)
    if keyword == "multipleOf" and value <= 0:
        raise _wrong(keyword, "a number above 0", value)
    if keyword in _TEXTS and not isinstance(value, str):
        raise _wrong(keyword, "a string", value)
    if keyword == "uniqueItems" and not isinstance(value, bool):
        raise _wrong(keyword, "a boolean", value)
    if keyword == "required" and not (isinstance(value, list) and all(isinstance(name, str) for name in value)):
        raise _wrong(keyword, "a list of names", value)
    if keyword == "enum" and not (isinstance(value, list) and value):
        raise _wrong(keyword, "a list that is not empty", value)
    if keyword == "type":
        _check_types(value)
    return value


def _check_types(value: Any) -> None:
    names = value if isinstance(value, list) else [value]
    if not names:
        raise _wrong("type", "a type or a list of types", value)
    for name in names:
        if not isinstance(name, str) or name not in IS_TYPE:
            raise GrammarError(f"{name} is no type of JSON schemas")


def _wrong(keyword: str, right: str, value: Any) -> GrammarError:
    return GrammarError(f"{keyword} of a JSON schema is {right}, not {kind_of(value)}")


def kind_of(value: object) -> str:
    """Names the type of a JSON value for the client."""
    if isinstance(value, bool | int | float):
        return str(value).lower()[:40]
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    return {str: "a string", type(None): "null"}.get(type(value), "an object")


def subschemas(schema: object) -> Iterator[dict[str, Any]]:
    """The schema in normal form and all schemas in it. Values (`const`, `enum`) are not searched."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if not isinstance(part, dict):
            continue
        yield part
        waiting += [part.get(keyword) for keyword in ONE_SCHEMA]
        for keyword in SCHEMA_LISTS:
            waiting += part.get(keyword, [])
        for keyword in (*NAMED_SCHEMAS, "$defs"):
            waiting += part.get(keyword, {}).values()

"""The jinja2 environment of chat templates, with exactly the functions that transformers offers."""

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_REPEATED = 4_000_000  # characters or items that one `*` may make
ASSISTANT_BEGIN, ASSISTANT_END = "__assistant_begin", "__assistant_end"  # variables of a template
MAX_BITS = 16_384  # of an integer that `*` or `**` makes


class Sandbox(ImmutableSandboxedEnvironment):
    """Adds bounds on products to jinja2's rules: one product could run for hours in C, where alarms do not arrive."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["namespace"] = _Namespace
        self.globals["dict"] = _new_dict
        del self.globals["lipsum"]

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > MAX_BITS:
                raise SecurityError("this power is too large for a chat template")
        elif isinstance(left, int) and isinstance(right, int):
            if left.bit_length() + right.bit_length() > MAX_BITS:
                raise SecurityError("this product is too large for a chat template")
        else:
            for sequence, times in ((left, right), (right, left)):
                if isinstance(times, int) and hasattr(sequence, "__len__") and len(sequence) * times > MAX_REPEATED:
                    raise SecurityError(f"a chat template may not repeat something to more than {MAX_REPEATED} items")
        operation: Callable[[Any, Any], Any] = self.binop_table[operator]
        return operation(left, right)


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training: its content is rendered between two variables."""

    tags = {"generation"}  # noqa: RUF012  declared by jinja2

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (nodes.Output([nodes.Name(name, "load")]) for name in (ASSISTANT_BEGIN, ASSISTANT_END))
        return nodes.Scope([begin, *body, end], lineno=line)


class _Namespace(Namespace):
    """jinja2's Namespace without names of Python internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        for name in dict(*args[1:], **kwargs):
            _check_name(name)
        Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"chat templates cannot store {name!r} in a namespace")


def _new_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without jinja2's HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)

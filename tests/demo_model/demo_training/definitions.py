"""Functions and classes of a source file, as the chat examples need them."""

import ast
import textwrap
import warnings
from dataclasses import dataclass

MAX_LINES = 48
MAX_CHARS = 1800

Def = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True, slots=True)
class Definition:
    module: str
    name: str
    is_class: bool
    signature: str  # "name(a, b=None)"; a class's name alone
    source: str  # dedented, decorators included, ends with a newline
    bare_source: str  # the same without its docstring; "" where nothing else is in the body
    doc: str  # the cleaned docstring, "" without one

    @property
    def summary(self) -> str:
        """The docstring's first paragraph as one line."""
        return " ".join(self.doc.split("\n\n", 1)[0].split())


def module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def definitions(path: str, text: str) -> list[Definition]:
    """Every function and class short enough to be an answer, nested ones too; [] for a file that does not parse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # test files are full of odd escapes
            tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return []
    lines = text.splitlines()
    nodes = (node for node in ast.walk(tree) if isinstance(node, Def))
    return [found for node in nodes if (found := _definition(module_name(path), lines, node)) is not None]


def _definition(module: str, lines: list[str], node: Def) -> Definition | None:
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    last = node.end_lineno or node.lineno
    source = textwrap.dedent("\n".join(lines[first - 1 : last])) + "\n"
    if not 2 <= last - first + 1 <= MAX_LINES or len(source) > MAX_CHARS or source[0].isspace():
        return None
    is_class = isinstance(node, ast.ClassDef)
    signature = node.name if isinstance(node, ast.ClassDef) else f"{node.name}({ast.unparse(node.args)})"
    doc = ast.get_docstring(node) or ""
    return Definition(module, node.name, is_class, signature, source, _without_doc(lines, node, first, last), doc)


def _without_doc(lines: list[str], node: Def, first: int, last: int) -> str:
    if ast.get_docstring(node, clean=False) is None or len(node.body) < 2:
        return ""
    doc = node.body[0]
    if doc.lineno == node.lineno or doc.end_lineno is None or node.body[1].lineno <= doc.end_lineno:
        return ""
    kept = lines[first - 1 : doc.lineno - 1] + lines[doc.end_lineno : last]
    return textwrap.dedent("\n".join(kept)) + "\n"

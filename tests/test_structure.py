"""How large folders, files and functions may be, that names, imports and fields have one meaning and one owner, and
how many tests may use private members."""

import ast
import gc
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(p for top in ("services", "shared", "kernels") for p in (ROOT / top).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
TOOL_PARSERS = ROOT / "shared" / "tool_parsers"
MODEL_FAMILIES = ROOT / "services" / "gpu_worker" / "models"
WEIGHT_FORMATS = ROOT / "services" / "gpu_worker" / "quantization" / "formats"
MOST_MODULES = 16  # in a folder, without __init__
MOST_LINES = 500
MOST_FUNCTION_LINES = 80
MOST_SHARED_NAMES = 5  # class names that two files define
MOST_SMALL_FILES = 35  # under 60 lines with one importer
MOST_INNER_IMPORTS = 16  # inside functions
MOST_TESTS_OF_PRIVATES = 31  # files of tests that use private members of what they test; only ever lowered
MOST_DEVICE_TESTS = 10  # lines of the worker and of transfers that test the kind of a device

Trees = dict[Path, ast.Module]


@pytest.fixture(scope="module")
def trees() -> Trees:
    gc.disable()  # trees are no garbage, and collections that visit all of them took four times as long as the rest
    found = {path: ast.parse(path.read_text()) for path in FILES}
    gc.freeze()
    gc.enable()
    return found


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("blockyard", *(parts[:-1] if parts[-1] == "__init__" else parts)))


MODULES = {module_name(path): path for path in FILES}


def imported_modules(tree: ast.Module) -> set[str]:
    """Modules of this project that a file imports anywhere, also inside functions."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            found.update(name if name in MODULES else node.module for name in names)
    return found & set(MODULES)


def test_no_import_by_a_string(trees: Trees) -> None:
    """`importlib.import_module` hides an import from this file's checks and from the type checker."""
    uses = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr == "import_module")
        or (isinstance(node, ast.Name) and node.id == "__import__")
    ]
    assert uses == []


def test_few_imports_are_inside_functions(trees: Trees) -> None:
    """Each of them is for an optional package, or for one whose load only some processes should wait for."""
    inner = {
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in FILES
        if re.search(r"^ +(import|from) ", path.read_text(), re.MULTILINE)
        for function in ast.walk(trees[path])
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert len(inner) <= MOST_INNER_IMPORTS, sorted(inner)


def test_few_places_test_the_kind_of_a_device() -> None:
    """Those choose operations and products. Others ask the `Backend`, or an object that it has made: a `HostLink`, an
    arena, the operations of a step."""
    tests = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in FILES
        if {"gpu_worker", "kv_transfer"} & set(path.parts)
        for line in path.read_text().splitlines()
        if "device.type" in line or "is_cuda" in line
    ]
    assert len(tests) <= MOST_DEVICE_TESTS, tests


def test_folders_hold_few_modules() -> None:
    sizes = Counter(path.parent for path in [*FILES, *TESTS] if path.name != "__init__.py")
    assert {str(folder): size for folder, size in sizes.items() if size > MOST_MODULES} == {}


def test_every_package_says_what_it_owns(trees: Trees) -> None:
    packages = [path for path in FILES if path.name == "__init__.py"]
    assert [str(path) for path in packages if len((ast.get_docstring(trees[path]) or "").split()) < 5] == []


def test_files_and_functions_can_be_read_at_once(trees: Trees) -> None:
    too_long = [str(path) for path in FILES if len(path.read_text().splitlines()) > MOST_LINES]
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MOST_FUNCTION_LINES:
                    too_long.append(f"{path}: {node.name}, {lines} lines")
    assert too_long == []


def test_few_small_files_have_one_importer(trees: Trees) -> None:
    """Except for families of models and formats of weights, each of which is one file by design."""
    importers: Counter[str] = Counter()
    for path in FILES:
        importers.update(imported_modules(trees[path]) - {module_name(path)})
    small = [
        name
        for name, path in MODULES.items()
        if importers[name] == 1 and len(path.read_text().splitlines()) < 60 and not path.name.startswith("__")
        if {TOOL_PARSERS, MODEL_FAMILIES, WEIGHT_FORMATS}.isdisjoint(path.parents)
    ]
    assert len(small) <= MOST_SMALL_FILES, small


def test_one_class_name_has_one_meaning(trees: Trees) -> None:
    places: defaultdict[str, set[Path]] = defaultdict(set)
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].add(path.relative_to(ROOT))
    twice = {name: sorted(map(str, paths)) for name, paths in places.items() if len(paths) > 1}
    assert len(twice) <= MOST_SHARED_NAMES, twice


def private_names() -> set[str]:
    """Functions, classes, variables and fields of the product whose names begin with one underscore."""
    name = re.compile(r"(?:def |class |self\.|^)(_[a-zA-Z]\w*)", re.MULTILINE)
    return {found for path in FILES for found in name.findall(path.read_text())}


def uses_from_outside(names: set[str], tree: ast.Module) -> Iterator[str]:
    """Imports of `names`, and members with these names of another object than `self` and `cls`.

    Members of modules that are imported whole are left out: those are other projects'.
    """
    modules = {
        alias.asname or alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from names.intersection(alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute) and node.attr in names:
            owner = ast.unparse(node.value)
            if owner not in {"self", "cls"} and owner.partition(".")[0] not in modules:
                yield f"{owner}.{node.attr}"


def test_few_tests_use_private_members() -> None:
    """A test asks for what callers see, so that what it does not test may change."""
    names, found = private_names(), dict[str, list[str]]()
    may_use = re.compile(r"(?<!self)\._[a-zA-Z]|\bimport\b[^\n]*\b_[a-zA-Z]|^ +_\w+,$", re.MULTILINE)
    for path in TESTS:
        text = path.read_text()
        if may_use.search(text) and (uses := set(uses_from_outside(names, ast.parse(text)))):
            found[str(path.relative_to(ROOT))] = sorted(uses)
    assert len(found) <= MOST_TESTS_OF_PRIVATES, (
        f"{len(found)} files of tests use private members of the product, at most {MOST_TESTS_OF_PRIVATES} may: test "
        f"what callers see, as frames, counts or results. These do: {found}"
    )

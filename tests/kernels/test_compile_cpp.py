"""Libraries are made once, by whatever compiler there is; without one it is said."""

import os
import subprocess
from pathlib import Path

import pytest

from blockyard.kernels.compile_cpp import Library, find_compiler

ANSWER = 'extern "C" int answer() { return %s; }\n'


@pytest.fixture
def compiler() -> str:
    found = find_compiler()
    if found is None:
        pytest.skip("no C++ compiler")
    return found


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source" / "answer.cpp"
    path.parent.mkdir()
    path.write_text('#include "number.h"\n' + ANSWER % "NUMBER")
    path.with_name("number.h").write_text("#define NUMBER 42\n")
    return path


def test_a_library_is_made_once(tmp_path: Path, source: Path, compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Library(source, tmp_path / "made", compiler)
    first.start()
    made = first.wait()
    assert made is not None, first.problem
    assert made.answer() == 42
    assert os.listdir(tmp_path / "made") == [first.path.name]
    monkeypatch.setattr(subprocess, "Popen", None)
    again = Library(source, tmp_path / "made", compiler)
    again.start()
    assert again.poll() is not None


def test_a_changed_header_makes_another(source: Path, tmp_path: Path, compiler: str) -> None:
    before = Library(source, tmp_path, compiler).path
    source.with_name("number.h").write_text("#define NUMBER 43\n")
    assert Library(source, tmp_path, compiler).path != before


def test_nobody_waits_for_the_compiler(source: Path, tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nread line < /dev/stdin\nsleep 0.3\nexit 3\n")
    slow.chmod(0o755)
    library = Library(source, tmp_path / "made", str(slow))
    library.start()
    assert library.poll() is None
    assert library.problem == ""
    assert library.wait() is None
    assert "failed (3)" in library.problem


def test_what_the_compiler_says_is_kept(source: Path, tmp_path: Path, compiler: str) -> None:
    source.write_text("int answer() { return unknown_name; }")
    library = Library(source, tmp_path / "made", compiler)
    library.start()
    assert library.wait() is None
    assert "unknown_name" in library.problem
    assert library.poll() is None
    assert os.listdir(tmp_path / "made") == []


def test_a_folder_that_cannot_be_made_is_a_problem(source: Path, tmp_path: Path, compiler: str) -> None:
    (tmp_path / "file").touch()
    library = Library(source, tmp_path / "file" / "made", compiler)
    library.start()
    assert library.poll() is None
    assert "file" in library.problem


def test_what_others_can_write_is_not_loaded(source: Path, tmp_path: Path, compiler: str) -> None:
    library = Library(source, tmp_path / "made", compiler)
    library.start()
    assert library.wait() is not None
    library.path.parent.chmod(0o777)
    again = Library(source, tmp_path / "made", compiler)
    again.start()
    assert again.poll() is None
    assert "others can write" in again.problem


def test_the_compiler_may_be_named(tmp_path: Path) -> None:
    assert find_compiler({"PATH": str(tmp_path)}) is None
    mine = tmp_path / "mine"
    mine.touch()
    mine.chmod(0o755)
    assert find_compiler({"PATH": str(tmp_path), "CXX": "mine"}) == str(mine)
    assert find_compiler({"PATH": str(tmp_path), "CXX": "another"}) is None

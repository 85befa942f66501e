"""Keys from flags, the environment and files."""

import os
from pathlib import Path

import pytest

from blockyard.shared.config import parsed_flags
from blockyard.shared.config.parsed_flags import Values
from blockyard.shared.config.server import access_keys
from blockyard.shared.config.server.access_keys import AccessKey, all_keys
from blockyard.shared.errors import ConfigError


def values_of(*args: str, environ: dict[str, str] | None = None) -> Values:
    return Values(parsed_flags.from_command_line(args)[0], parsed_flags.from_environment(environ or {})[0])


def keys(*args: str, environ: dict[str, str] | None = None) -> list[str]:
    return access_keys.flag_keys(values_of(*args, environ=environ), "api-key")


def test_flags_and_the_lines_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("\nthird \r\n\n fourth")
    assert keys() == [] == all_keys([], "", "--api-key-file")
    assert keys(environ={"BLOCKYARD_API_KEY": "a b"}) == ["a", "b"]
    assert all_keys(keys("--api-key", "first", "second"), str(file), "") == [
        AccessKey("first", "key-0"),
        AccessKey("second", "key-1"),
        AccessKey("third", "key-2"),
        AccessKey("fourth", "key-3"),
    ]


def test_the_tenant_of_a_named_key_does_not_depend_on_its_place(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("gone 1111\nann 2222\n3333\nann\t4444\n")
    before = all_keys([], str(file), "")
    file.write_text("ann 2222\n3333\nann\t4444\n")
    after = all_keys([], str(file), "")
    assert before[1:2] + before[3:] == after[:1] + after[2:] == [AccessKey("2222", "ann"), AccessKey("4444", "ann")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b" \n\n", "holds no key"),
        (b"\xff", "not UTF-8"),
        (b"good\n\nann hunter2 more\n", "line 3 has 3 words; KEY or NAME KEY is expected"),
        (b"admin hunter2", "line 1: a name has up to 64 letters"),
        (b"key-7 hunter2", "line 1: a name has up to 64 letters"),
        (b'a"b hunter2', "line 1: a name has up to 64 letters"),
        (b"ann hunter2\nbob hunter2", "has one key twice"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, content: bytes | None, message: str) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"--api-key-file {file}: .*{message}") as refusal:
        access_keys.key_file(values_of("--api-key-file", str(file)), "api-key-file")
    assert "hunter2" not in str(refusal.value)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    os.mkfifo(file)
    with pytest.raises(ConfigError, match=f"--api-key-file {file}: is no regular file"):
        access_keys.key_file(values_of("--api-key-file", str(file)), "api-key-file")


def test_an_empty_key_is_refused_and_does_not_mean_that_none_is_asked_for() -> None:
    for environ in ({"BLOCKYARD_API_KEY": ""}, {"BLOCKYARD_API_KEY": " "}):
        with pytest.raises(ConfigError, match="BLOCKYARD_API_KEY: an empty key"):
            keys(environ=environ)
    with pytest.raises(ConfigError, match="--api-key: an empty key"):
        keys("--api-key", "good", "")
    with pytest.raises(ConfigError, match="not UTF-8"):
        keys("--api-key", "\udcff")

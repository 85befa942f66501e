"""Keys from flags, the environment and files."""

from pathlib import Path

import pytest

from blockyard.shared.config import http_server, parsed_flags
from blockyard.shared.config.parsed_flags import Values
from blockyard.shared.errors import ConfigError


def keys(*args: str, environ: dict[str, str] | None = None) -> list[str]:
    values = Values(parsed_flags.from_command_line(args)[0], parsed_flags.from_environment(environ or {})[0])
    return http_server.read_keys(values, "api-key", "api-key-file")


def test_flags_and_the_lines_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("\nthird \r\n\n fourth")
    assert keys() == []
    assert keys("--api-key", "first", "second", "--api-key-file", str(file)) == ["first", "second", "third", "fourth"]
    assert keys(environ={"BLOCKYARD_API_KEY": "a b", "BLOCKYARD_API_KEY_FILE": str(file)}) == [
        "a",
        "b",
        "third",
        "fourth",
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "No such file"), (b" \n\n", "holds no key"), (b"\xff", "not UTF-8")],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, content: bytes | None, message: str) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"--api-key-file {file}: .*{message}"):
        keys("--api-key-file", str(file))


def test_an_empty_key_is_refused_and_does_not_mean_that_none_is_asked_for() -> None:
    for environ in ({"BLOCKYARD_API_KEY": ""}, {"BLOCKYARD_API_KEY": " "}):
        with pytest.raises(ConfigError, match="BLOCKYARD_API_KEY: an empty key"):
            keys(environ=environ)
    with pytest.raises(ConfigError, match="--api-key: an empty key"):
        keys("--api-key", "good", "")
    with pytest.raises(ConfigError, match="not UTF-8"):
        keys("--api-key", "\udcff")

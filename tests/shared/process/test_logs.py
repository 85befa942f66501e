"""The log of a process, in its own format and in that of a file."""

import logging
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from blockyard.shared.errors import ConfigError
from blockyard.shared.process import logs

log = logging.getLogger("blockyard.services.some.part")
LATE = {"delay": True}  # the file is opened for the first line


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    before, level, factory = root.handlers[:], root.level, logging.getLogRecordFactory()
    yield
    for handler in [each for each in root.handlers if each not in before]:
        handler.close()
    root.handlers[:] = before
    root.setLevel(level)
    logging.setLogRecordFactory(factory)


def file_config(folder: Path, **more: object) -> str:
    config: dict[str, object] = {
        "version": 1,
        "formatters": {"own": {"format": "%(processName)s|%(levelname)s|%(message)s"}},
        "handlers": {
            "file": {"class": "logging.FileHandler", "filename": str(folder / "log"), "formatter": "own"} | LATE
        },
        "root": {"level": "WARNING", "handlers": ["file"]},
    }
    path = folder / "config.json"
    path.write_bytes(msgspec.json.encode(config | more))
    return str(path)


def test_a_file_decides_where_lines_go_and_knows_the_process(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    logs.setup("api_gateway 3", "info", file_config(tmp_path))
    log.info("a detail")
    log.warning("a problem")
    assert (tmp_path / "log").read_text() == "api_gateway 3|WARNING|a problem\n"
    assert capfd.readouterr().err == ""


def test_without_a_file_lines_go_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    logs.setup("scheduler", "info")
    log.info("a detail")
    assert capfd.readouterr().err.endswith(" INFO    scheduler: a detail\n")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"version": 2}, "Unsupported version"),
        ({"handlers": {"file": {"class": "no.such.Handler"}}}, "no"),
        ({"root": {"handlers": ["none"]}}, "none"),
    ],
)
def test_a_file_that_cannot_be_used_is_an_error(tmp_path: Path, more: dict[str, object], words: str) -> None:
    file = file_config(tmp_path, **more)
    with pytest.raises(ConfigError, match=f"--log-config-file {file}: .*{words}"):
        logs.setup("scheduler", "info", file)

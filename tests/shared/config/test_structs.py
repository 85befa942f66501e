import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from blockyard.shared.config.services.detokenizer import DetokenizerConfig
from blockyard.shared.config.services.process import BusConfig, ProcessConfig
from blockyard.shared.config.services.scheduler import SchedulerConfig
from blockyard.shared.errors import ConfigError
from blockyard.shared.process import settings

SRC = Path(__file__).parents[3] / ".src"
PROCESS = ProcessConfig(name="detokenizer 0", bus=BusConfig(registry="ipc:///d/message-bus", bind="ipc:///d"))


def test_settings_round_trip(tmp_path: Path) -> None:
    config = DetokenizerConfig(process=PROCESS, tokenizer_path="/m")
    (tmp_path / "s.json").write_bytes(msgspec.json.encode(config))
    assert settings.read(tmp_path / "s.json", DetokenizerConfig) == config


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('{"tokenizer_path": "/m"}', "process"),
        (
            '{"process": {"name": "x", "bus": {"registry": "ipc:///a", "bind": "ipc:///b"}}, "tokenizer": "/m"}',
            "tokenizer",
        ),
        (
            '{"process": {"name": "x", "bus": {"registry": "udp://a", "bind": "ipc:///b"}}, "tokenizer_path": "/m"}',
            "udp",
        ),
        ("{", "s.json"),
    ],
)
def test_bad_settings_are_named(tmp_path: Path, text: str, names: str) -> None:
    (tmp_path / "s.json").write_text(text)
    with pytest.raises(ConfigError, match=names):
        settings.read(tmp_path / "s.json", DetokenizerConfig)


def test_a_settings_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"s\.json: No such file"):
        settings.read(tmp_path / "s.json", DetokenizerConfig)


def test_values_out_of_range_do_not_decode() -> None:
    with pytest.raises(ValueError, match="depth must be >= 0, got -1"):
        SchedulerConfig(process=PROCESS, served_model_names=["m"], depth=-1)


PROGRAM = """
import sys
from blockyard.shared.process import settings
from blockyard.shared.config.services.detokenizer import DetokenizerConfig
from blockyard.shared.errors import LoadError

def serve(config):
    raise LoadError("no tokenizer.json in " + config.tokenizer_path)

sys.exit(settings.run(DetokenizerConfig, serve))
"""


def run_program(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, path], env={"PYTHONPATH": str(SRC)}, capture_output=True, text=True, check=False
    )


def test_a_failed_start_is_one_line_and_an_exit_code(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_bytes(msgspec.json.encode(DetokenizerConfig(process=PROCESS, tokenizer_path="/m")))
    done = run_program(path)
    assert (done.returncode, done.stderr) == (3, "error: no tokenizer.json in /m\n")
    path.write_text("{}")
    done = run_program(path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1


def test_under_a_launcher_the_line_is_left_beside_the_settings(tmp_path: Path) -> None:
    import os

    process = msgspec.structs.replace(PROCESS, parent_pid=os.getpid())
    path = tmp_path / "s.json"
    path.write_bytes(msgspec.json.encode(DetokenizerConfig(process=process, tokenizer_path="/m")))
    done = run_program(path)
    assert (done.returncode, done.stderr) == (3, "")
    assert (tmp_path / "s.error").read_text() == "no tokenizer.json in /m"


def test_a_process_whose_launcher_is_gone_ends(tmp_path: Path) -> None:
    process = msgspec.structs.replace(PROCESS, parent_pid=1 << 22)
    path = tmp_path / "s.json"
    path.write_bytes(msgspec.json.encode(DetokenizerConfig(process=process, tokenizer_path="/m")))
    done = run_program(path)
    assert (done.returncode, done.stderr) == (1, ""), "a refused start ends many, and says why in one line"


def test_bindings_list_no_leaks_when_a_worker_ends() -> None:
    pytest.importorskip("triton")
    script = """
import ctypes, sys
from triton._C.libtriton import ir
from blockyard.shared.process import settings
kept = ir.context()
ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
print("last words")
END
"""
    for end, leaks in (("settings.end(3)", False), ("sys.exit(3)", True)):
        words, env = [sys.executable, "-P", "-c", script.replace("END", end)], {"PYTHONPATH": str(SRC)}
        done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (3, "last words\n")
        assert ("leaked" in done.stderr) is leaks, done.stderr[:300]

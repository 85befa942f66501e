"""The command line as users see it: real processes, exit codes, one line an error."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from blockyard.services.cli import main as cli
from blockyard.services.launcher import serve
from blockyard.shared.bus.curve import PUBLIC_NAME, SECRET_NAME
from blockyard.shared.config.flags import documents, vllm_only

SRC = Path(__file__).parents[3] / ".src"


def blockyard(*args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BLOCKYARD_")}
    return subprocess.run(
        [sys.executable, "-m", "blockyard", *args],
        env=kept | {"PYTHONPATH": str(SRC)} | variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["serve", "--prot", "1"], "blockyard serve: error: --prot: no such flag; did you mean --port?"),
        (
            ["serve", "-spec-draft-tp", "2"],
            "blockyard serve: error: -spec-draft-tp 2: not built yet: speculative decoding",
        ),
        (
            ["serve", "/no/such"],
            "blockyard serve: error: model /no/such: no such folder, and not a valid hub name",
        ),
        (
            ["serve", "demo", "--chat-template", "/no.jinja"],
            "blockyard serve: error: --chat-template /no.jinja: No such file or directory",
        ),
        (
            ["serve", "demo", "--bind", "tcp://x"],
            "blockyard serve: error: --bind: is for `blockyard run`; serve starts its own ring",
        ),
        (
            ["serve", "demo", "--role", "prefill"],
            "blockyard serve: error: --role: is for `blockyard run`; serve starts its own ring",
        ),
        (
            ["serve", "demo", "--kv-transfer-config", '{"kv_connector": "Foo", "kv_role": "kv_both"}'],
            "blockyard serve: error: --kv-transfer-config: kv_connector Foo: unknown; use one of auto, cuda_ipc, shm, "
            "tcp, nixl",
        ),
        (
            ["serve", "demo", "--kv-transfer-config.kv_connector", "tcp"],
            "blockyard serve: error: --kv-transfer-config: kv_connector needs kv_role: kv_producer, kv_consumer or "
            "kv_both",
        ),
        (
            ["serve", "demo", "--max-model-len", "8K"],
            "blockyard serve: error: --max-model-len 8192 is more than the 4096 tokens config.json allows; "
            "--hf-overrides or --rope-scaling can extend that",
        ),
        (["run", "scheduler"], "blockyard run: error: run: --message-bus is needed, e.g. tcp://message-bus:5700"),
        (["sreve"], "blockyard sreve: error: no such command; did you mean serve?"),
        (["ring", "x", "--run-dir", "/x"], "blockyard ring: error: expected flags and --check, got x"),
        (["keys"], "blockyard keys: error: expected a folder: blockyard keys DIR"),
    ],
)
def test_a_wrong_line_is_one_line_and_exit_code_2(args: list[str], line: str) -> None:
    done = blockyard(*args)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"{line}\n")


@pytest.mark.parametrize(
    "args",
    [
        ["serve", "--help"],
        ["flags"],
        ["version"],
        ["bench", "serve", "--help"],
        ["simulate", "--generate", "sharegpt", "--requests", "3000"],
    ],
)
def test_a_closed_pipe_ends_it_without_output(args: list[str]) -> None:
    """`blockyard flags | head` closes it once head has seen enough."""
    reader, writer = os.pipe()
    os.close(reader)
    env = os.environ | {"PYTHONPATH": str(SRC)}
    env.pop("PYTHONUNBUFFERED", None)  # argparse ignores errors of writes, but not of the flush behind them
    command = [sys.executable, "-m", "blockyard", *args]
    done = subprocess.run(command, env=env, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


INTERRUPTED_WHILE_IT_LOADS = """
import os, runpy, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == MODULE:
            os.kill(os.getpid(), signal.SIGINT)

MODULE = sys.argv.pop()
sys.meta_path.insert(0, Interrupt())
runpy.run_module("blockyard", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("module", ["blockyard.services.cli.main", "blockyard.services.launcher.serve", "yaml"])
def test_ctrl_c_while_it_loads_ends_it_quietly(module: str) -> None:
    command = [sys.executable, "-P", "-c", INTERRUPTED_WHILE_IT_LOADS, "version", module]
    env = os.environ | {"PYTHONPATH": str(SRC)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_an_unknown_service_is_refused_with_the_list() -> None:
    done = blockyard("run", "schedular", "--run-dir", "/x")
    assert done.returncode == 2
    assert "message-bus, api-gateway, tokenizer-pool, scheduler, detokenizer, gpu-worker" in done.stderr


def test_a_wrong_variable_is_one_line_too() -> None:
    done = blockyard("serve", "demo", BLOCKYARD_DTYPE="int8")
    assert done.returncode == 2
    assert done.stderr == (
        "blockyard serve: error: BLOCKYARD_DTYPE: 'int8' is none of auto, half, float16, bfloat16, float, float32\n"
    )


def test_a_taken_port_is_one_line() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        done = blockyard("serve", "demo", "--host", "127.0.0.1", "--port", str(port))
    assert (done.returncode, done.stderr) == (
        2,
        f"blockyard serve: error: port {port} is in use; choose another with --port\n",
    )


def test_keys_are_written_once_and_private(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    assert blockyard("keys", str(folder)).returncode == 0
    for name in (PUBLIC_NAME, SECRET_NAME):
        assert (folder / name).stat().st_mode & 0o777 == 0o600
    again = blockyard("keys", str(folder))
    assert again.returncode == 2
    assert again.stderr.count("\n") == 1


def test_run_replaces_the_process_with_the_service(tmp_path: Path) -> None:
    """A registry on tcp without readable keys: the service itself says so, after the exec."""
    done = blockyard("run", "message-bus", "--message-bus", "tcp://127.0.0.1:1", "--curve-keys", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.startswith("error: cannot read key file")
    assert done.stderr.count("\n") == 1


def test_a_flag_with_another_effect_prints_a_note(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    async def end(*_: object) -> None:
        """In place of a ring."""

    monkeypatch.setattr(serve, "run_ring", end)
    monkeypatch.setattr(serve, "setproctitle", lambda title: None)
    monkeypatch.setattr(serve.logs, "setup", lambda *_: None)
    monkeypatch.setattr(serve.ports, "check", lambda gateways: None)
    flags = ["--num-scheduler-steps", "4", "--swap-space", "0.5", "--preemption-mode", "recompute"]
    assert serve.main(["demo", "--worker-cls", "mock", "--run-dir", str(tmp_path / "r"), *flags]) == 0
    said = capsys.readouterr().out
    assert "--num-scheduler-steps 4: N above 1 is --run-ahead N-1" in said
    assert "--swap-space: no host memory is taken, --preemption-mode is recompute" in said


def test_help_version_and_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    assert "blockyard serve [MODEL]" in capsys.readouterr().out
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("blockyard 0.")
    assert cli.main(["serve", "--help"]) == 0
    assert "--max-num-seqs" in capsys.readouterr().out
    assert cli.main(["flags"]) == 0
    assert "--enable-lora" in capsys.readouterr().out
    assert cli.main(["flags", "--markdown"]) == 0
    assert capsys.readouterr().out.strip() == f"{documents.markdown()}\n\n{documents.markdown(vllm_only.GROUPS)}"
    assert cli.main(["api"]) == 0
    assert "| `POST /v1/chat/completions` | `--api-key` |" in capsys.readouterr().out


def test_the_table_is_written_into_a_document(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    of_vllm = f"{documents.BEGIN_OF_VLLM}\nold\n{documents.END_OF_VLLM}"
    path.write_text(f"before\n{documents.BEGIN}\nbygone\n{documents.END}\n{of_vllm}\nafter\n")
    assert cli.main(["flags", "--write", str(path)]) == 0
    assert path.read_text() == documents.with_table(path.read_text())
    assert "bygone" not in path.read_text()
    assert path.read_text().startswith("before\n")
    assert path.read_text().endswith("\nafter\n")


PROBE = """
import sys
from blockyard.services.cli import main
from blockyard.services.launcher.supervision import ring
heavy = ("torch", "numpy", "rich", "huggingface_hub", "transformers", "aiohttp", "tokenizers")
print([name for name in heavy if name in sys.modules])
"""


def test_the_launcher_imports_nothing_heavy() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROBE], env={"PYTHONPATH": str(SRC)}, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_the_module_path_of_vllm_is_serve() -> None:
    command = [sys.executable, "-P", "-m", "blockyard.entrypoints.openai.api_server"]
    env = os.environ | {"PYTHONPATH": str(SRC)}
    done = subprocess.run([*command, "--porrt", "1"], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and done.stderr == blockyard("serve", "--porrt", "1").stderr
    done = subprocess.run([*command, "--help"], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, blockyard("serve", "--help").stdout)

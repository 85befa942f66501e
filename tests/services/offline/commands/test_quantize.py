"""`blockyard quantize` as users see it: a folder that is served, and what it costs."""

import subprocess
import sys
from pathlib import Path

import pytest

from blockyard.services.offline.commands import quantize
from blockyard.shared.errors import ConfigError


def blockyard(*words: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-P", "-m", "blockyard", "quantize", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)


def test_the_demo_model_in_4_bits(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text(Path(subprocess.__file__).read_text()[:4000])
    run = blockyard("demo", tmp_path / "out", "--to", "w4", "--group", 32, "--asymmetric", "--text", text)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("model.layers.")] == [
        f"model.layers.{i}" for i in range(6)
    ]
    [bits] = [line for line in lines if line.startswith("bits per byte: ")]
    before, after = (float(bits.split()[i]) for i in (3, 5))
    assert before < after < 1.1 * before < 1.2


def test_errors_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "some").touch()
    run = blockyard("demo", tmp_path, "--to", "int8")
    assert run.returncode == 2
    assert run.stderr == f"blockyard quantize: error: {tmp_path}: the folder is not empty\n"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["demo", "out"], "required: --to"),
        (["demo", "out", "--to", "w3"], "argument --to: invalid choice: 'w3'"),
        (["demo", "out", "--to", "int8", "--group", "64"], "--group is for --to w4"),
        (["demo", "out", "--to", "int8", "--asymmetric"], "--asymmetric is for --to w4"),
        (["demo", "out", "--to", "w4", "--group", "0"], "--group 0: groups have at least 1"),
        (["demo", "out", "--to", "w4", "--text", "/no/such"], "--text /no/such: No such file"),
        (["demo", "out", "--to", "w4", "--ignore", "re:("], r"^--ignore 're:\(' is not a regular expression: missing"),
        (["/no/such", "out", "--to", "w4"], "model /no/such: no such folder"),
    ],
)
def test_wrong_flags(words: list[str], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        quantize.main(words)


def test_a_model_inside_a_folder_of_modules(tmp_path: Path) -> None:
    """The modules around it would be lost."""
    inside = tmp_path / "0_Transformer"
    inside.mkdir()
    (inside / "config.json").write_text('{"architectures": ["BertModel"]}')
    entry = '{"type": "sentence_transformers.models.Transformer", "path": "0_Transformer"}'
    (tmp_path / "modules.json").write_text(f"[{entry}]")
    with pytest.raises(ConfigError, match=r"0_Transformer: the modules\.json of this model is in the folder around it"):
        quantize.main([str(tmp_path), str(tmp_path / "out"), "--to", "w4"])

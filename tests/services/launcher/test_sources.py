from pathlib import Path

import pytest

from blockyard.services.launcher import serve, sources
from blockyard.shared.errors import ConfigError


def test_a_yaml_file_has_the_lowest_precedence(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("port: 3\nhost: f\nmax_num_seqs: 7\nrope-scaling:\n  rope_type: linear\n  factor: 2.0\n")
    values, positionals, notes = sources.read(
        ["serve-me", "--config", str(path), "--port", "1"], {"BLOCKYARD_HOST": "e", "HOME": "/"}
    )
    assert [values[name] for name in ("port", "host", "max-num-seqs")] == [1, "e", 7]
    assert values["rope-scaling"] == {"rope_type": "linear", "factor": 2.0}
    assert (positionals, notes) == (["serve-me"], [])


def test_the_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("port: 3")
    assert sources.read([], {"BLOCKYARD_CONFIG": str(path)})[0]["port"] == 3


def test_an_empty_file_is_fine(tmp_path: Path) -> None:
    (tmp_path / "e.yaml").write_text("# nothing\n")
    assert sources.read(["--config", str(tmp_path / "e.yaml")], {})[0]["port"] == 8000


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- port\n", "expected a mapping"),
        ("port: [", "not YAML"),
        ("config: other.yaml", "cannot name another"),
        ("prot: 1", "c.yaml: prot: no such flag; did you mean port?"),
        ("skip-tokenizer-init: true", "c.yaml: skip-tokenizer-init: not built yet: serving without a tokenizer"),
        ("port: !!python/object/apply:os.system [true]", "not YAML"),
    ],
)
def test_a_bad_file_is_one_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        sources.read(["--config", str(path)], {})
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"--config /no/such\.yaml: No such file or directory"):
        sources.read(["--config", "/no/such.yaml"], {})


@pytest.mark.parametrize(
    ("args", "model"),
    [
        ([], "facebook/opt-125m"),
        (["demo"], "demo"),
        (["--model", "a/b"], "a/b"),
        (["a/b", "--model", "a/b"], "a/b"),
        (["--worker-cls", "mock"], "demo"),
        (["--worker-cls", "mock", "a/b"], "a/b"),
    ],
)
def test_which_model_is_served(args: list[str], model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BLOCKYARD_MODEL", raising=False)
    assert serve.read_values(args)[0]["model"] == model


def test_a_model_of_the_command_line_is_before_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKYARD_MODEL", "a/b")
    assert serve.read_values(["demo"])[0]["model"] == "demo"


@pytest.mark.parametrize(
    ("args", "words"), [(["a", "b"], "expected one model, got a b"), (["a", "--model", "b"], "which one")]
)
def test_two_models_are_too_many(args: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        serve.read_values(args)

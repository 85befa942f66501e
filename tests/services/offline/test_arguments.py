"""EngineArgs: the keywords of LLM as an object and on a script's own command line."""

import argparse
import dataclasses

import pytest

from blockyard import EngineArgs
from blockyard.services.offline.engine_args import KEYWORDS, read
from blockyard.shared.config.flags import FLAGS


def parser() -> argparse.ArgumentParser:
    made = EngineArgs.add_cli_args(argparse.ArgumentParser())
    made.set_defaults(model="demo")
    made.add_argument("--max-tokens", type=int)  # of the script's own
    return made


def test_it_has_every_keyword_and_no_other() -> None:
    names = {field.name for field in dataclasses.fields(EngineArgs)}  # type: ignore[arg-type]
    assert names == set(KEYWORDS)
    assert {"model", "max_model_len", "enforce_eager", "hf_token", "kv_cache_memory_bytes"} <= names
    assert not names & {"port", "api_key", "uds"}
    with pytest.raises(TypeError, match="max_num_sequences"):
        EngineArgs(max_num_sequences=4)
    with pytest.raises(AttributeError, match="max_num_sequences"):
        _ = EngineArgs().max_num_sequences


def test_a_none_argument_is_not_given() -> None:
    given = EngineArgs(model="demo", max_num_seqs=8)
    values, notes = read(None, dataclasses.asdict(given), {"BLOCKYARD_DTYPE": "half"})  # type: ignore[call-overload]
    assert [values[name] for name in ("model", "max-num-seqs", "dtype")] == ["demo", 8, "half"]
    assert not values.is_given("preemption-mode") and notes == []


def test_a_scripts_own_parser() -> None:
    words = "--max-model-len 4k --enforce-eager --no-enable-prefix-caching --hf-token --max_num_seqs 4 --max-tokens 9"
    args = parser().parse_args([*words.split(), "--served-model-name", "a", "b"])
    given = EngineArgs.from_cli_args(args)
    assert (given.model, given.max_model_len, given.max_num_seqs, given.hf_token) == ("demo", 4000, 4, "true")
    assert (given.enforce_eager, given.enable_prefix_caching, given.dtype) == (True, False, None)
    keywords = vars(args)
    assert keywords.pop("max_tokens") == 9
    values, _ = read(None, keywords, {})
    assert values["max-model-len"] == 4000 and values["served-model-name"] == ["a", "b"]
    assert not values.is_given("dtype")


def test_a_group_of_the_scripts_own() -> None:
    made = argparse.ArgumentParser()
    group = made.add_argument_group("Engine arguments")
    assert EngineArgs.add_cli_args(group) is group
    group.set_defaults(model="demo")
    assert made.parse_args(["--dtype", "half"]).dtype == "half"


def test_a_wrong_value_ends_the_script_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["--dtype", "int3"])
    assert "'int3' is none of auto, half" in capsys.readouterr().err
    assert all(name in parser().format_help() for name in ("--max-model-len", "--no-enable-prefix-caching"))


def test_every_flag_of_the_engine_can_be_said() -> None:
    made = parser()
    for name, flag in KEYWORDS.items():
        assert FLAGS[flag.name] is flag
        assert getattr(made.parse_args([]), name) == ("demo" if name == "model" else None)

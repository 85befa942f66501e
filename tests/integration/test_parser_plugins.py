"""Formats of a user's file, from the command line to the answers of a server."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from rig import ROOT, serve

PLUGIN = """
import dataclasses

from blockyard.shared.tool_parsers.json_calls.families import HERMES


def read(text, tools):
    for part in HERMES.read(text, tools):
        if part is not None and tools[0].name == "raises":
            raise ValueError("this answer is not to my liking")
        yield part


def write_grammar(rules, tools, parallel):
    if any(tool.name == "no_grammar" for tool in tools):
        raise LookupError("there is no such grammar")
    return HERMES.write_grammar(rules, tools, parallel)


OWN = dataclasses.replace(HERMES, name="own", aliases=(), read=read, write_grammar=write_grammar)
"""
SCHEMA = {
    "type": "object",
    "properties": {"size": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["size"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    path = tmp_path_factory.mktemp("plugin") / "own.py"
    path.write_text(PLUGIN)
    flags = ("--tool-parser-plugin", str(path), "--tool-call-parser", "own", "--enable-auto-tool-choice")
    with (
        serve("demo", "--dtype", "float32", *flags) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made,
    ):
        yield made


def ask(client: openai.OpenAI, name: str, **more: Any) -> Any:
    tools = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}}]
    fields: dict[str, Any] = {
        "tools": tools,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 200,
    }
    return client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "hi"}], **fields | more)


def test_a_format_of_a_plugin_reads_calls_also_of_large_bodies(client: openai.OpenAI) -> None:
    large = [{"role": "user", "content": "hi"}, {"role": "tool", "tool_call_id": "a", "content": "x" * 100}] * 800
    for more in ({}, {"extra_body": {"ignored": large}}):  # read in place, and in a process of its own
        [choice] = ask(client, "measure", **more).choices
        [call] = choice.message.tool_calls
        assert (choice.finish_reason, call.function.name) == ("tool_calls", "measure")
        jsonschema.validate(json.loads(call.function.arguments), SCHEMA)


def test_a_format_that_raises_fails_its_request_alone_by_name(client: openai.OpenAI) -> None:
    with ThreadPoolExecutor(4) as threads:
        failing = [threads.submit(ask, client, "raises", tool_choice="auto") for _ in range(2)]
        others = [threads.submit(ask, client, "measure") for _ in range(2)]
        for one in failing:
            error = one.exception()
            assert isinstance(error, openai.APIStatusError), error
            assert "own" in str(error) and "ValueError: this answer is not to my liking" in str(error)
        assert all(one.result().choices[0].message.tool_calls for one in others)


def test_a_stream_of_a_format_that_raises_ends_with_the_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIError, match=r"own.* this answer is not to my liking"):
        list(ask(client, "raises", tool_choice="auto", stream=True))


@pytest.mark.parametrize(
    ("source", "said"),
    [("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"), ("x = (", "SyntaxError")],
)
def test_a_plugin_that_does_not_import_ends_the_start_with_one_line(tmp_path: Path, source: str, said: str) -> None:
    path = tmp_path / "wrong.py"
    path.write_text(source)
    command = [sys.executable, "-m", "blockyard", "serve", "demo", "--tool-parser-plugin", str(path)]
    env = os.environ | {"PYTHONPATH": str(ROOT / ".src")}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    [line] = ended.stderr.splitlines()
    assert line.startswith(f"blockyard serve: error: --tool-parser-plugin {path}: does not import: {said}")
    assert ended.returncode == 2 and ended.stdout == ""

"""Continue's command line from its npm package edits a file over several turns of chat completions.

Run by `make test-clients`, which installs it. The answers are scripted.
"""

from itertools import pairwise
from pathlib import Path

import pytest
from agent_scripts import PARSERS, PROGRAMS, call, play, rendered, run

from blockyard.shared.messages import Tokenize

PROGRAM = PROGRAMS / "cn"
pytestmark = pytest.mark.skipif(not PROGRAM.exists(), reason="make test-clients installs Continue")
CONFIG = """\
name: Local
version: 1.0.0
schema: v1
models:
  - name: Blockyard
    provider: openai
    model: tiny
    apiBase: {url}/v1
    apiKey: one
    roles: [chat, edit, apply]
    capabilities: [tool_use]
"""


def answers(file: Path) -> list[str]:
    """By the number of results that the prompt has."""
    return [
        "<think>I write it.</think>So." + call("Write", filepath=str(file), content="hello\nworld\n"),
        "<think>I look.</think>" + call("Read", filepath=str(file)),
        "<think>I change it.</think>" + call("Edit", file_path=str(file), old_string="world", new_string="there"),
        "The file says hello there.",
    ]


async def test_continue_edits_a_file_over_several_turns(rig, tmp_path: Path) -> None:
    folder, config = tmp_path / "work", tmp_path / "config.yaml"
    file = folder / "hello.txt"
    planned = answers(file)
    async with rig(tools=PARSERS, api_keys=["one"]) as r:
        play(r.ring, ["tiny"], planned, lambda asked: bool(asked.tools))
        config.write_text(CONFIG.format(url=r.url))
        environment = {"HOME": str(tmp_path), "CONTINUE_TELEMETRY_ENABLED": "0"}
        asked = ("-p", "Write hello there into hello.txt.", "--config", config, "--auto")
        said = await run(folder, environment, PROGRAM, *asked)
        prompts = rendered([frame for frame in r.ring.frames(Tokenize) if frame.tools])
    assert "The file says hello there." in said, said
    assert file.read_text() == "hello\nthere\n"
    assert len(prompts) == len(planned)
    assert all(after.startswith(before.removesuffix("<|assistant|>")) for before, after in pairwise(prompts))

"""Claude Code from its npm package, set to address, key and model alone, edits a file over several turns.

Run by `make test-clients`, which installs it. The answers are scripted.
"""

from itertools import pairwise
from pathlib import Path

import pytest
from agent_scripts import PARSERS, PROGRAMS, call, play, rendered, run

from blockyard.shared.messages import Tokenize

PROGRAM = PROGRAMS / "claude"
pytestmark = pytest.mark.skipif(not PROGRAM.exists(), reason="make test-clients installs Claude Code")


def answers(file: Path) -> list[str]:
    """By the number of results that the prompt has."""
    return [
        "<think>I write it.</think>I write it." + call("Write", file_path=str(file), content="hello\nworld\n"),
        "<think>I look.</think>" + call("Read", file_path=str(file)),
        "<think>I change it.</think>" + call("Edit", file_path=str(file), old_string="world", new_string="there"),
        "The file says hello there.",
    ]


async def test_claude_code_edits_a_file_over_several_turns(rig, tmp_path: Path) -> None:
    file, planned = tmp_path / "hello.txt", answers(tmp_path / "hello.txt")
    async with rig(tools=PARSERS, api_keys=["one"]) as r:
        play(r.ring, ["tiny"], planned, lambda asked: b'"Write"' in asked.tools)
        environment = {
            "HOME": str(tmp_path),
            "ANTHROPIC_BASE_URL": r.url,
            "ANTHROPIC_API_KEY": "one",
            "ANTHROPIC_MODEL": "tiny",
        }
        asked = ("-p", "Write hello there into hello.txt.", "--permission-mode", "acceptEdits")
        said = await run(tmp_path, environment, PROGRAM, *asked)
        prompts = rendered([frame for frame in r.ring.frames(Tokenize) if b'"Write"' in frame.tools])
    assert "The file says hello there." in said
    assert file.read_text() == "hello\nthere\n"
    assert len(prompts) == len(planned)
    assert all(after.startswith(before) for before, after in pairwise(prompts))
    assert not any("x-anthropic-billing-header" in prompt for prompt in prompts)

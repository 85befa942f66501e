"""Codex from its npm package, set to address, key and model alone, edits a file over several turns.

Run by `make test-clients`, which installs it. The answers are scripted. Codex has three sets of tools: for a model that
it does not know, for models that get `apply_patch` as a custom tool with a grammar, and for models that write
JavaScript, whose tools come as an item of the input. It sends the last two to a server whose model has such a name.
"""

import json
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from agent_scripts import PARSERS, PROGRAMS, call, play, rendered, run

from blockyard.shared.messages import Tokenize

PROGRAM = PROGRAMS / "codex"
pytestmark = pytest.mark.skipif(not PROGRAM.exists(), reason="make test-clients installs Codex")
WRITE, READ = "printf 'hello\\nworld\\n' > hello.txt", "cat hello.txt"
PATCH = "*** Begin Patch\n*** Update File: hello.txt\n@@\n hello\n-world\n+there\n*** End Patch\n"
IN_A_SHELL = [call("exec_command", cmd=WRITE), call("exec_command", cmd=READ)]


def script(name: str, argument: object) -> str:
    """A call of the tool that runs JavaScript, in which other tools are called."""
    return call("exec", input=f"text(JSON.stringify(await tools.{name}({json.dumps(argument)})))")


CASES = {
    "tiny": ([*IN_A_SHELL, call("exec_command", cmd="sed -i s/world/there/ hello.txt")], {"exec_command"}),
    "gpt-5.5": ([*IN_A_SHELL, call("apply_patch", input=PATCH)], {"exec_command", "apply_patch", "tool_search"}),
    "gpt-6.2-sol": (
        [script("exec_command", {"cmd": WRITE}), script("exec_command", {"cmd": READ}), script("apply_patch", PATCH)],
        {"exec", "wait", "spawn_agent"},
    ),
}


@pytest.mark.parametrize("model", CASES)
async def test_codex_edits_a_file_over_several_turns(rig, tmp_path: Path, model: str) -> None:
    calls, tools = CASES[model]
    thoughts = ["I write it.", "I look.", "I change it."]
    planned = [f"<think>{thought}</think>So.{one}" for thought, one in zip(thoughts, calls, strict=True)]
    planned.append("The file says hello there.")
    folder = tmp_path / "work"
    async with rig(tools=PARSERS, api_keys=["one"]) as r:
        play(r.ring, ["tiny", model], planned, lambda asked: bool(asked.tools))
        environment = {"HOME": str(tmp_path), "CODEX_API_KEY": "one"}
        settings = ("-c", f'openai_base_url="{r.url}/v1"', "-m", model)
        free = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")  # a folder of the test
        said = await run(folder, environment, PROGRAM, "exec", *settings, *free, "Write hello there into hello.txt.")
        frames = r.ring.frames(Tokenize)
        prompts = rendered(frames)
    assert "The file says hello there." in said, said
    assert (folder / "hello.txt").read_text() == "hello\nthere\n"
    assert len(prompts) == len(planned)
    assert all(after.startswith(before) for before, after in pairwise(prompts))
    assert all(thought in prompts[-1] for thought in thoughts)  # the reasoning came back
    assert all(shown == frames[0].tools for shown in (frame.tools for frame in frames))
    assert tools <= {one["function"]["name"] for one in msgspec.json.decode(frames[0].tools)}

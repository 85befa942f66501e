"""Claude Code from its npm package, set to address, key and model alone, edits a file over several turns.

Run by `make test-clients`, which installs it. The answers are scripted.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_ring import END, SCHEDULER, member

from blockyard.services.tokenizer_pool.chats.chat_template import Chat, ChatTemplates
from blockyard.shared.messages import Role, Tokenize, ToolDefaults

PROGRAM = Path(__file__).parents[4] / ".clients" / "node_modules" / ".bin" / "claude"
PARSERS = ToolDefaults(auto_choice=True, parser="hermes", reasoning_parser="qwen3", reasoning_end="</think>")
TEMPLATE = """\
{%- for m in messages %}
{%- if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}
{{- '<|' + m.role + '|>' + (m.reasoning_content or '') + m.content }}
{%- for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}
{%- endfor %}{{ '<|assistant|>' if add_generation_prompt }}"""
PIECE = 7  # characters of a token
pytestmark = pytest.mark.skipif(not PROGRAM.exists(), reason="make test-clients installs Claude Code")


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def answers(file: Path) -> list[str]:
    """By the number of results that the prompt has."""
    return [
        "<think>I write it.</think>I write it." + call("Write", file_path=str(file), content="hello\nworld\n"),
        "<think>I look.</think>" + call("Read", file_path=str(file)),
        "<think>I change it.</think>" + call("Edit", file_path=str(file), old_string="world", new_string="there"),
        "The file says hello there.",
    ]


async def run(folder: Path, url: str) -> str:
    environment = {
        "HOME": str(folder),
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "one",
        "ANTHROPIC_MODEL": "tiny",
    }
    process = await asyncio.create_subprocess_exec(
        *(PROGRAM, "-p", "Write hello there into hello.txt.", "--permission-mode", "acceptEdits"),
        cwd=folder,
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await asyncio.wait_for(process.communicate(), 120)
    return out.decode()


async def test_claude_code_edits_a_file_over_several_turns(rig, tmp_path: Path) -> None:
    file, planned = tmp_path / "hello.txt", answers(tmp_path / "hello.txt")
    async with rig(tools=PARSERS, api_keys=["one"]) as r:
        card = msgspec.structs.replace(r.ring.members[SCHEDULER].card, max_model_len=1_000_000)
        r.ring.join(member(Role.SCHEDULER, SCHEDULER, card=card))

        def script(request_id: str, index: int) -> str:
            [asked] = [frame for frame in r.ring.frames(Tokenize) if frame.request_id == request_id]
            text = planned[asked.messages.count(b'"role":"tool"')] if b'"Write"' in asked.tools else "{}"
            return text[index * PIECE :][:PIECE] or END

        r.ring.script = script
        said = await run(tmp_path, r.url)
        prompts = [frame for frame in r.ring.frames(Tokenize) if b'"Write"' in frame.tools]
    assert "The file says hello there." in said
    assert file.read_text() == "hello\nthere\n"
    assert len(prompts) == len(planned)
    templates, earlier = ChatTemplates({"default": TEMPLATE}, {}), ""
    for frame in prompts:
        prompt = templates.render(Chat(msgspec.json.decode(frame.messages), [], {}, None, True, False))
        assert prompt.startswith(earlier) and "x-anthropic-billing-header" not in prompt
        earlier = prompt

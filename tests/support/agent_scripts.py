"""Scripted answers for coding agents that talk to a fake ring: by the number of tool results that a prompt has."""

import asyncio
import json
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from fake_ring import END, SCHEDULER, FakeRing, member

from blockyard.services.tokenizer_pool.chats.chat_template import Chat, ChatTemplates
from blockyard.shared.messages import Role, Tokenize, ToolDefaults

PROGRAMS = Path(__file__).parents[2] / ".clients" / "node_modules" / ".bin"  # of `make test-clients`
PARSERS = ToolDefaults(auto_choice=True, parser="hermes", reasoning_parser="qwen3", reasoning_end="</think>")
TEMPLATE = """\
{%- for m in messages %}
{%- if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}
{{- '<|' + m.role + '|>' + (m.reasoning_content or '') }}
{%- if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}
{%- for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}
{%- endfor %}{{ '<|assistant|>' if add_generation_prompt }}"""
PIECE = 7  # characters of a token
CONTEXT = 1_000_000
PATIENCE_S = 90


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def play(ring: FakeRing, names: list[str], planned: list[str], is_turn: Callable[[Tokenize], bool]) -> None:
    """Answers the agent's turns with the planned texts, and other requests, such as of a title, with "{}"."""
    card = msgspec.structs.replace(ring.members[SCHEDULER].card, names=names, max_model_len=CONTEXT)
    ring.join(member(Role.SCHEDULER, SCHEDULER, card=card))

    def script(request_id: str, index: int) -> str:
        [asked] = [frame for frame in ring.frames(Tokenize) if frame.request_id == request_id]
        results = asked.messages.count(b'"role":"tool"')
        text = planned[results] if is_turn(asked) else "{}"
        return text[index * PIECE :][:PIECE] or END

    ring.script = script
    ring.rejected = "\0"  # agents write the word


async def run(folder: Path, environment: dict[str, str], *command: str | Path) -> str:
    """What the program writes, in an environment without anything of the developer's."""
    folder.mkdir(exist_ok=True)
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env={"PATH": "/usr/local/bin:/usr/bin:/bin"} | environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    said: list[bytes] = []
    try:
        async with asyncio.timeout(PATIENCE_S):
            while piece := await process.stdout.read(1 << 16):
                said.append(piece)
            await process.wait()
    except TimeoutError as e:
        raise AssertionError(f"the program did not end: {b''.join(said).decode()}") from e
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return b"".join(said).decode()


def rendered(frames: list[Tokenize]) -> list[str]:
    templates = ChatTemplates({"default": TEMPLATE}, {})
    return [templates.render(Chat(msgspec.json.decode(f.messages or b""), [], {}, None, True, False)) for f in frames]

"""Places instructions, messages of the roles system and developer, that stand between the turns of a conversation.

An agent's prompts should be prefixes of each other. Therefore an instruction stays where it is if the template renders
it as a turn of its own, which is found by rendering probes once per template. Otherwise it joins the user's message or
the tool result before it, else the user's message behind it, else it is a user's message. It never stands between a
call and its result. The first message of a conversation stays where it is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from blockyard.shared.errors import RequestError

Message = dict[str, Any]
Render = Callable[[list[Message]], str]  # up to where the model's turn begins; raises RequestError

ROLES = ("system", "developer")
SEPARATOR = "\n\n"  # between the texts of messages that are joined
# Texts that no template contains, and which look the same after trimming.
HEAD, ASKED, ANSWERED, RESULT, ASKED_AGAIN, PROBE = (f"probe{i}text" for i in range(6))


@dataclass(frozen=True, slots=True)
class InstructionTurns:
    """What a template makes of instructions."""

    between: dict[str, str]  # by role: the role under which it renders them as a turn, at any place
    first: dict[str, str]  # by role: the same for the first message of a conversation


def probe_template(render: Render) -> InstructionTurns:
    """Finds by probes what the template renders."""
    turns = [role for role in ROLES if _renders_turns(render, role)]
    heads = [role for role in ROLES if _renders_head(render, role)]
    between = {role: role if role in turns else turns[0] for role in ROLES if turns}
    return InstructionTurns(between, {role: role if role in heads else heads[0] for role in ROLES if heads})


def place_instructions(messages: list[Message], turns: Callable[[], InstructionTurns]) -> list[Message]:
    """Returns the messages with instructions where the template renders them. `turns` is called if there is one."""
    roles = [message.get("role") for message in messages]
    if roles[:1] != ["developer"] and not any(role in ROLES for role in roles[1:]):
        return messages
    known = turns()
    placed: list[Message] = []
    held: list[Message] = []  # instructions that wait for the message behind them
    for message, role in zip(messages, roles, strict=True):
        if role in ROLES and (placed or held):
            held.append(message)
        elif role in ROLES:
            placed.append({**message, "role": known.first.get(role, role)})
        elif role == "tool":  # nothing stands between a call and its results
            placed.append(message)
        else:
            placed.append(_place(held, placed, message, known))
            held = []
    if held:
        _place(held, placed, {}, known)
    return placed


def _place(held: list[Message], placed: list[Message], following: Message, known: InstructionTurns) -> Message:
    """Adds instructions to the placed messages. Returns the following message, which they may have joined."""
    to_join: Any = None
    for instruction in held:
        role, content = known.between.get(instruction["role"]), instruction.get("content")
        if role is not None:
            placed.append({**instruction, "role": role})
        elif placed[-1].get("role") in ("user", "tool"):
            placed[-1] = {**placed[-1], "content": joined(placed[-1].get("content"), content)}
        elif following.get("role") == "user":
            to_join = joined(to_join, content)
        else:
            placed.append({**instruction, "role": "user"})
    return following if to_join is None else {**following, "content": joined(to_join, following.get("content"))}


def joined(before: Any, after: Any) -> Any:
    """The content of two messages as one."""
    if not before or not after:
        return before or after
    if isinstance(before, str) and isinstance(after, str):
        return before + SEPARATOR + after
    return [*_parts(before), *_parts(after)]


def _parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


_SYSTEM: Message = {"role": "system", "content": HEAD}
_USER: Message = {"role": "user", "content": ASKED}
_ANSWER: Message = {"role": "assistant", "content": ANSWERED}
_USER_AGAIN: Message = {"role": "user", "content": ASKED_AGAIN}
_FUNCTION = {"name": "probe", "arguments": {}}
_CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "probe0000", "type": "function", "function": _FUNCTION}],
}
_RESULT: Message = {"role": "tool", "tool_call_id": "probe0000", "name": "probe", "content": RESULT}
# what stands before and behind an instruction
_PLACES: tuple[tuple[list[Message], list[Message]], ...] = (
    ([_SYSTEM], [_USER]),
    ([_SYSTEM, _USER], []),
    ([_USER], [_ANSWER, _USER_AGAIN]),
    ([_SYSTEM, _USER, _ANSWER], [_USER_AGAIN]),
    ([_SYSTEM, _USER, _ANSWER, _USER_AGAIN], []),
    ([_SYSTEM, _USER, _CALL, _RESULT], []),
    ([_SYSTEM, _USER, _CALL, _RESULT], [_ANSWER, _USER_AGAIN]),
)


def _renders_turns(render: Render, role: str) -> bool:
    """Whether an instruction is one more piece of the prompt, at its place, wherever the template takes the others."""
    instruction, num_places = {"role": role, "content": PROBE}, 0
    for before, behind in _PLACES:
        without = _rendered(render, [*before, *behind])
        if without is None:  # the template has no system prompt, or no calls
            continue
        num_places += 1
        with_it = _rendered(render, [*before, instruction, *behind])
        if with_it is None or not _is_inserted(without, with_it, before, behind):
            return False
    return num_places > 0


def _is_inserted(without: str, with_it: str, before: list[Message], behind: list[Message]) -> bool:
    differs = (i for i, (one, other) in enumerate(zip(without, with_it, strict=False)) if one != other)
    common = next(differs, len(without))
    inserted = with_it[common : len(with_it) - (len(without) - common)]
    if not with_it.endswith(without[common:]) or with_it.count(PROBE) != 1 or PROBE not in inserted:
        return False
    left = with_it[: with_it.index(PROBE)]
    shown = [(message["content"], message in before) for message in [*before, *behind] if message["content"] in without]
    return all((text in left) == is_before for text, is_before in shown)


def _renders_head(render: Render, role: str) -> bool:
    return PROBE in (_rendered(render, [{"role": role, "content": PROBE}, _USER]) or "")


def _rendered(render: Render, messages: list[Message]) -> str | None:
    try:
        return render(messages)
    except RequestError:
        return None

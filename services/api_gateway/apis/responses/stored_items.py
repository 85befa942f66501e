"""Items of stored responses: of an input as they are kept and listed, and of a conversation read back.

The id of a stored response is `resp_` and a name, which begins with the gateway that keeps it. Items that have no id
get one with the same name.
"""

import secrets
from collections.abc import Iterable
from typing import Any

import msgspec

from blockyard.services.api_gateway.apis.responses.schemas import InputItem, ItemPart
from blockyard.shared.errors import RequestError
from blockyard.shared.ring_client.request_fields.known_fields import decode_known

RESPONSE_ID = "resp_"
STORED_MARK = "s"  # begins the name of a stored response
GATEWAY_CHARS = 17  # of the name: the mark, and the gateway's incarnation in hexadecimal digits
INPUT_MARK, OUTPUT_MARK = "_i", "_o"  # in ids of items, between the name and the item's number
PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "tool_search_call": "tsc",
    "tool_search_output": "tso",
}
REFERENCE = "item_reference"  # an item of the input that means a stored one
CALLS = ("function_call", "custom_tool_call", "tool_search_call")
encode = msgspec.json.Encoder().encode


class _Output(msgspec.Struct):
    """The fields by which items of an answer are left out of the conversation that goes on."""

    type: str
    status: str | None = None


class _Answer(msgspec.Struct):
    status: str
    output: list[msgspec.Raw] = []


def response_name(response_id: str) -> str:
    return response_id.removeprefix(RESPONSE_ID)


def response_of_item(item_id: str) -> str:
    """The id of the response that the item is in; empty if the id does not name one."""
    name, mark, number = item_id.partition("_")[2].rpartition("_")
    return RESPONSE_ID + name if name and mark and number[:1] in ("i", "o") else ""


def new_name(gateway: int) -> str:
    """The unique part of the id of a response that this gateway keeps."""
    return f"{STORED_MARK}{gateway:016x}{secrets.token_hex(12)}"


def gateway_of(response_id: str) -> int | None:
    """The incarnation of the gateway that keeps the response; None if the id is not of a stored one."""
    name = response_name(response_id)[:GATEWAY_CHARS]
    digits = name.removeprefix(STORED_MARK)
    is_name = response_id.startswith(RESPONSE_ID + STORED_MARK) and len(name) == GATEWAY_CHARS
    return int(digits, 16) if is_name and all(one in "0123456789abcdef" for one in digits) else None


def stored_input(given: str | list[InputItem], name: str) -> bytes:
    """The items of an input as a JSON list, each with a type and an id. `name`: of the response."""
    items = [InputItem(role="user", content=given)] if isinstance(given, str) else given
    return encode([_stored(item, f"{name}{INPUT_MARK}{i:02x}") for i, item in enumerate(items)])


def _stored(item: InputItem, name: str) -> dict[str, Any]:
    kind = item.type or "message"
    fields: dict[str, Any] = {"type": kind, "id": item.id or f"{PREFIXES.get(kind, 'item')}_{name}"}
    fields |= {key: value for key, value in _set_fields(item) if key not in fields}
    if kind in PREFIXES:
        fields.setdefault("status", "completed")
    if kind == "message":
        text = "output_text" if item.role == "assistant" else "input_text"
        if isinstance(item.content, str):
            fields["content"] = [ItemPart(type=text, text=item.content)]
    elif kind == "reasoning":
        fields.setdefault("summary", [])
    for key, value in fields.items():
        if isinstance(value, list) and value and isinstance(value[0], ItemPart):
            fields[key] = [_part(part) for part in value]
    return fields


def _part(part: ItemPart) -> dict[str, Any]:
    fields = dict(_set_fields(part))
    if part.type == "output_text":
        fields.setdefault("annotations", [])
    return fields


def _set_fields(value: msgspec.Struct) -> Iterable[tuple[str, Any]]:
    """The fields that are not null, by their names in JSON."""
    for name, encoded in zip(value.__struct_fields__, value.__struct_encode_fields__, strict=True):
        field = getattr(value, name)
        if field is not None and not (isinstance(field, msgspec.Raw) and bytes(field) == b"null"):
            yield encoded, field


def status_of(answer: bytes) -> str:
    """The status of a response's object."""
    return msgspec.json.decode(answer, type=_Answer).status


def output_of(answer: bytes) -> list[msgspec.Raw]:
    """The items of a response's object with which a conversation goes on. A call that was cut is none."""
    items = msgspec.json.decode(answer, type=_Answer).output
    return [item for item in items if not _is_cut_call(msgspec.json.decode(item, type=_Output))]


def _is_cut_call(item: _Output) -> bool:
    return item.type in CALLS and item.status == "incomplete"


def with_items(given: list[InputItem], referenced: bytes) -> list[InputItem]:
    """The input with stored items in place of the references to them. Raises RequestError."""
    stored = iter(read_history(referenced))
    return [next(stored) if item.type == REFERENCE and item.id is not None else item for item in given]


def read_history(history: bytes) -> list[InputItem]:
    """The items of earlier stored responses. Raises RequestError if another version has stored them in another form."""
    try:
        items: list[InputItem] = decode_known(history, list[InputItem])[0]
    except (msgspec.DecodeError, RecursionError) as e:
        raise RequestError(f"the stored items cannot be read: {e}", "previous_response_id") from e
    return items

"""Every frame survives the wire, tolerates a newer sender, and is told apart from a cut one."""

import enum
import types
from typing import Annotated, Any, Union, get_args, get_origin

import msgspec
import pytest

from blockyard.shared import messages
from blockyard.shared.messages import Frame, FrameStruct

UNIONS = {
    name: union
    for name in ("RegistryIn", "GatewayIn", "TokenizerIn", "SchedulerIn", "WorkerIn", "RankBenchLine")
    if isinstance(union := getattr(messages, name), types.UnionType)
}
FRAMES = [(name, frame) for name, union in UNIONS.items() for frame in get_args(union)]
SAMPLES: dict[Any, Any] = {str: "text", int: 7, float: 1.5, bool: True, bytes: b"\x01\x00\x00\x00", type(None): None}
SAMPLES[msgspec.Raw] = msgspec.Raw(b"\x07")


def sample(kind: Any) -> Any:
    """A value of a field's type that differs from the usual default."""
    if kind in SAMPLES:
        return SAMPLES[kind]
    if get_origin(kind) is Annotated:
        base, declared = get_args(kind)
        value = sample(base)
        return value if declared.le is None or value <= declared.le else declared.le / 2
    if get_origin(kind) is list:
        return [sample(get_args(kind)[0])]
    if get_origin(kind) is tuple:
        return tuple(sample(k) for k in get_args(kind))
    if get_origin(kind) in (types.UnionType, Union):
        return sample(next(k for k in get_args(kind) if k is not type(None)))
    if issubclass(kind, enum.Enum):
        return list(kind)[-1]
    assert issubclass(kind, FrameStruct | Frame), kind
    return kind(*(sample(f.type) for f in msgspec.structs.fields(kind)))


@pytest.mark.parametrize(("union", "frame"), FRAMES)
def test_a_frame_survives_the_wire(union: str, frame: type[Frame]) -> None:
    value = sample(frame)
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=UNIONS[union])
    assert decoded == value
    assert type(decoded) is frame


@pytest.mark.parametrize(("union", "frame"), FRAMES)
def test_fields_a_newer_sender_adds_are_skipped(union: str, frame: type[Frame]) -> None:
    value = sample(frame)
    longer = [*msgspec.msgpack.decode(msgspec.msgpack.encode(value)), "a field of tomorrow"]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(longer), type=UNIONS[union]) == value


@pytest.mark.parametrize(("union", "frame"), [one for one in FRAMES if msgspec.structs.fields(one[1])])
def test_a_frame_without_its_last_field_is_refused_or_takes_the_default(union: str, frame: type[Frame]) -> None:
    shorter = msgspec.msgpack.encode(msgspec.msgpack.decode(msgspec.msgpack.encode(sample(frame)))[:-1])
    last = msgspec.structs.fields(frame)[-1]
    if last.required:
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(shorter, type=UNIONS[union])
    else:
        decoded = msgspec.msgpack.decode(shorter, type=UNIONS[union])
        default = last.default if last.default_factory is msgspec.NODEFAULT else last.default_factory()
        assert getattr(decoded, last.name) == default


def test_sampling_outside_its_ranges_is_refused() -> None:
    for wrong in ({"top_p": 0.0}, {"temperature": 101.0}, {"repetition_penalty": 0.0}, {"min_tokens": -1}):
        data = msgspec.msgpack.encode(messages.Sampling(1, **wrong))
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(data, type=messages.Sampling)


def test_a_frame_of_another_socket_is_refused() -> None:
    data = msgspec.msgpack.encode(messages.Leave(1))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(data, type=messages.SchedulerIn)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (messages.FinishReason, ["STOP", "LENGTH", "CANCELLED", "FAILED"]),
        (messages.ControlVerb, ["STATUS", "RESET_PREFIX_CACHE", "PAUSE", "RESUME", "SLEEP", "WAKE_UP"]),
        (messages.BeamStop, ["LIKELY", "FIRST", "NEVER"]),
    ],
)
def test_a_number_on_the_wire_keeps_its_meaning(kind: type[enum.IntEnum], names: list[str]) -> None:
    """A peer may be of another version, so a new member goes last."""
    assert [kind(number).name for number in range(len(names))] == names


def test_every_frame_is_in_a_union() -> None:
    taken = {frame for _, frame in FRAMES} | {messages.TokenBatch, messages.Members, messages.Hello}
    # commands to the ranks of a worker stay within it
    assert {f for f in Frame.__subclasses__() if f.__module__.startswith(messages.__name__)} == taken

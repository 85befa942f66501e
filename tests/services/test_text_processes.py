"""The real tokenizer and detokenizer processes on a bus of their own: ready, serving, SIGTERM, exit code 0."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from blockyard.services.message_bus.service import Membership, Registry
from blockyard.shared.bus.links import Links
from blockyard.shared.bus.member_list import Gone
from blockyard.shared.bus.registry_socket import RegistrySocket
from blockyard.shared.config.services.process import BusConfig
from blockyard.shared.messages import (
    FinishReason,
    GatewayIn,
    Role,
    SchedulerIn,
    Stop,
    StreamOpen,
    TextBatch,
    TextOptions,
    TextRejected,
    TokenBatch,
    Tokenize,
    Tokenized,
    TokenStep,
)
from blockyard.shared.token_ids import unpack

ROOT = Path(__file__).parents[2]
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
DEAF = "{{ ([[1]] * 4000000) | sum(start=[]) }}"  # runs in C, so that no Python code runs meanwhile
LIMIT_S = 20.0


@pytest.fixture
def bus(tmp_path: Path) -> Iterator[BusConfig]:
    config = BusConfig(registry=f"ipc://{tmp_path}/bus", bind=f"ipc://{tmp_path}")
    stopped, socket = threading.Event(), RegistrySocket(config)
    registry = Registry(socket, Membership(time.monotonic(), dead_after_s=3.0, settle_s=1.0))
    thread = threading.Thread(target=registry.run, args=(stopped,))
    thread.start()
    yield config
    stopped.set()
    thread.join()
    socket.close()


@contextlib.contextmanager
def process(role: str, bus: BusConfig, folder: Path, **settings: Any) -> Iterator[subprocess.Popen[bytes]]:
    config = settings | {
        "process": {"name": role, "bus": {"registry": bus.registry, "bind": bus.bind}},
        "tokenizer_path": str(folder),
        "served_model_names": ["m"],
    }
    path = folder / f"{role}.json"
    path.write_text(json.dumps(config))
    command = [sys.executable, "-m", f"blockyard.services.{role}", str(path)]
    env = os.environ | {"PYTHONPATH": str(ROOT / ".src")}
    child = subprocess.Popen(command, env=env, stderr=subprocess.PIPE)
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


class Peer:
    """A gateway or scheduler played by the test."""

    def __init__(self, links: "Links[Any]") -> None:
        self.links = links
        self.got: list[Any] = []

    def until(self, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < deadline, "nothing came"
            self.got.extend(event for _, event in self.links.poll(0.05))

    def taken(self, *kinds: type) -> list[Any]:
        return [event for event in self.got if isinstance(event, kinds)]


def end(child: "subprocess.Popen[bytes]") -> int:
    child.send_signal(signal.SIGTERM)
    return child.wait(10)


def test_tokenizer_process(bus: BusConfig, tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    byte_tokenizer.save(str(tmp_path / "tokenizer.json"))
    with (
        Links("gateway", Role.API_GATEWAY, bus, GatewayIn) as links,
        process("tokenizer_pool", bus, tmp_path, trust_request_chat_template=True) as child,
    ):
        gateway = Peer(links)
        gateway.until(lambda: links.of(Role.TOKENIZER_POOL, "m"))
        (member,) = links.of(Role.TOKENIZER_POOL)
        assert member.phase == "ready" and any("vocabulary" in note for note in member.notes)
        chat = b'[{"role": "user", "content": "x"}]'
        for request in (
            Tokenize("loop", "m", messages=chat, chat_template=LOOP),
            Tokenize("deaf", "m", messages=chat, chat_template=DEAF),
            Tokenize("text", "m", text="the fox"),
        ):
            assert links.send(member.incarnation, request)
        gateway.until(lambda: len(gateway.taken(Tokenized, TextRejected)) == 3)
        loop, deaf, text = gateway.taken(Tokenized, TextRejected)
        assert (loop.request_id, loop.field, "takes more than" in loop.message) == ("loop", "messages", True)
        assert (deaf.request_id, deaf.field, "takes more than" in deaf.message) == ("deaf", "messages", True)
        assert unpack(text.token_ids) == byte_tokenizer.encode("the fox").ids
        gateway.until(lambda: links.members[member.incarnation].stats.requests_total == 3)
        assert links.members[member.incarnation].stats.rss_bytes < 70e6
        assert not gateway.taken(Gone)  # its heartbeats continued
        assert end(child) == 0


def test_a_template_of_a_request_is_refused_unless_trusted(
    bus: BusConfig, tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    byte_tokenizer.save(str(tmp_path / "tokenizer.json"))
    with Links("gateway", Role.API_GATEWAY, bus, GatewayIn) as links, process("tokenizer_pool", bus, tmp_path):
        gateway = Peer(links)
        gateway.until(lambda: links.of(Role.TOKENIZER_POOL, "m"))
        chat = b'[{"role": "user", "content": "x"}]'
        links.send(links.of(Role.TOKENIZER_POOL)[0].incarnation, Tokenize("a", "m", messages=chat, chat_template="x"))
        gateway.until(lambda: gateway.taken(TextRejected))
        (rejected,) = gateway.taken(TextRejected)
        assert rejected.field == "chat_template" and "--trust-request-chat-template" in rejected.message


def test_detokenizer_process(bus: BusConfig, tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    byte_tokenizer.save(str(tmp_path / "tokenizer.json"))
    ids = byte_tokenizer.encode("the quick fox", add_special_tokens=False).ids
    with (
        Links("gateway", Role.API_GATEWAY, bus, GatewayIn) as gateway_links,
        process("detokenizer", bus, tmp_path) as child,
        Links("scheduler", Role.SCHEDULER, bus, SchedulerIn) as scheduler_links,
    ):
        gateway_links.update(ready=True)
        gateway, scheduler = Peer(gateway_links), Peer(scheduler_links)
        gateway.until(lambda: gateway_links.of(Role.DETOKENIZER))
        # the scheduler needs both members in its list before it sends
        scheduler.until(lambda: scheduler_links.of(Role.DETOKENIZER) and scheduler_links.of(Role.API_GATEWAY))
        (member,) = scheduler_links.of(Role.DETOKENIZER)
        opened = StreamOpen("r", 1, 0, gateway_links.me.incarnation, b"", b"", 0, TextOptions(stop=["ick"]))
        assert scheduler_links.send(member.incarnation, TokenBatch([opened], [TokenStep("r", 1, 0, 0, ids)], [], 1.5))
        gateway.until(lambda: gateway.taken(TextBatch))
        (batch,) = gateway.taken(TextBatch)
        (delta,) = batch.deltas
        assert (delta.text, delta.finish, delta.stop_reason) == ("the qu", FinishReason.STOP, "ick")
        assert batch.stamp_s == 1.5
        scheduler.until(lambda: scheduler.taken(Stop))
        scheduler.until(lambda: scheduler_links.members[member.incarnation].stats.output_tokens_total)
        assert scheduler_links.members[member.incarnation].stats.rss_bytes < 70e6
        assert end(child) == 0


@pytest.mark.parametrize("role", ["tokenizer_pool", "detokenizer"])
def test_a_folder_without_tokenizer_is_one_line(role: str, bus: BusConfig, tmp_path: Path) -> None:
    with process(role, bus, tmp_path) as child:
        _, said = child.communicate(timeout=LIMIT_S)
        assert child.returncode == 3
        assert (
            said.decode() == f"error: tokenizer: {tmp_path} has neither tokenizer.json nor vocab.json with merges.txt\n"
        )

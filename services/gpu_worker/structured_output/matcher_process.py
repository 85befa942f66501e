"""A matcher process: `python -m blockyard.services.gpu_worker.structured_output.matcher_process SOCKET MEMORY PARENT`.

SOCKET and MEMORY are inherited descriptors, PARENT is the process id of the worker. It ends when the worker has closed
the socket or has ended.
"""

import gc
import logging
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable

import msgspec
from setproctitle import setproctitle

from blockyard.services.gpu_worker.child_processes.frame_socket import FrameSocket
from blockyard.services.gpu_worker.structured_output.mask_memory import MaskMemory
from blockyard.services.gpu_worker.structured_output.matcher_frames import (
    EngineFailed,
    EngineReady,
    MatcherSettings,
    SlotClose,
    SlotOpen,
    ToMatcher,
)
from blockyard.services.gpu_worker.structured_output.reasoning_ends import EndsByText, load_texts
from blockyard.services.gpu_worker.structured_output.slot_matchers import SlotMatchers
from blockyard.shared import tokenizer_files
from blockyard.shared.grammars import engines
from blockyard.shared.grammars.interface import Engine, Vocabulary
from blockyard.shared.process.settings import die_with, wake_on_time

log = logging.getLogger(__name__)

MakeEngine = Callable[[MatcherSettings], Engine]
IDLE_S = 3600.0
SPIN_S = 0.001  # after a token of a device the next ones are looked for without a sleep


def main(arguments: list[str], make_engine: MakeEngine) -> None:
    """Runs a process until the worker is gone."""
    sock_fd, memory_fd, parent = map(int, arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the worker decides
    die_with(parent)
    setproctitle("blockyard: matcher")
    frames = FrameSocket(socket.socket(fileno=sock_fd), msgspec.msgpack.Decoder(ToMatcher))
    serve(frames, memory_fd, make_engine)


def serve(frames: FrameSocket[ToMatcher], memory_fd: int, make_engine: MakeEngine) -> None:
    select.select([frames.sock], [], [])
    first, *others = _wait_for_frames(frames)
    assert isinstance(first, MatcherSettings)
    memory = MaskMemory(memory_fd, first.num_slots, first.vocab_size)
    try:
        engine = make_engine(first)
    except Exception as e:
        log.exception("the engine %s cannot be loaded", first.engine)
        frames.send(EngineFailed(f"{first.engine}: {e}"))
        _drain(frames)
        return
    frames.send(EngineReady())
    gc.collect()
    gc.freeze()  # later collections do not look at what the engine has loaded
    if first.poll_s:
        wake_on_time()
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    ends = EndsByText(lambda: load_texts(first), first.vocab_size)
    matchers = SlotMatchers(engine, memory, first.eos_token_ids, frames.send, lambda: _write_byte(wake), ends)
    inbound = others
    while frames.is_open:
        for frame in inbound:
            if isinstance(frame, SlotOpen):
                matchers.open(frame)
            elif isinstance(frame, SlotClose):
                matchers.close(frame)
        matchers.turn()
        timeout = IDLE_S
        if matchers.have_opened:
            timeout = 0.0
        elif first.poll_s and matchers.are_waiting:
            timeout = 0.0 if time.monotonic() - matchers.last_token_s < SPIN_S else first.poll_s
        sock = frames.sock.fileno()
        ready, _, _ = select.select([sock, woken], [sock] if frames.has_unsent else [], [], timeout)
        if woken in ready:
            os.read(woken, 4096)
        inbound = frames.receive()


def load_engine(settings: MatcherSettings) -> Engine:
    """Loads the engine with the tokens of the model."""
    tokenizer = tokenizer_files.load(settings.tokenizer_path).tokenizer
    return engines.make_engine(
        settings.engine, Vocabulary(tokenizer.to_str(), settings.vocab_size, settings.eos_token_ids)
    )


def _wait_for_frames(frames: FrameSocket[ToMatcher]) -> list[ToMatcher]:
    while frames.is_open:
        if inbound := frames.receive():
            return inbound
        select.select([frames.sock], [], [])
    sys.exit(0)


def _drain(frames: FrameSocket[ToMatcher]) -> None:
    while frames.has_unsent and frames.is_open:
        select.select([], [frames.sock], [])
        frames.flush()


def _write_byte(fd: int) -> None:
    try:
        os.write(fd, b"w")
    except BlockingIOError:
        return  # it is full of wake-ups


if __name__ == "__main__":
    main(sys.argv[1:], load_engine)
    os._exit(0)  # threads that compile are not waited for

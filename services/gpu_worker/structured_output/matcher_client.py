"""The worker's end of one matcher process: starts it, exchanges frames with it, sees its end."""

import contextlib
import subprocess
import time
from collections.abc import Sequence

import msgspec

from blockyard.services.gpu_worker.child_processes.frame_socket import FrameSocket
from blockyard.services.gpu_worker.child_processes.start import end_child, start_child
from blockyard.services.gpu_worker.structured_output.matcher_frames import (
    EngineFailed,
    EngineReady,
    FirstMask,
    FromMatcher,
    MatcherSettings,
    SlotClosed,
    SlotFailed,
    ToMatcher,
)
from blockyard.shared.process.signals import ended_from_outside

COMMAND = ("-m", "blockyard.services.gpu_worker.structured_output.matcher_process")
AboutSlot = FirstMask | SlotClosed | SlotFailed
EXIT_S = 0.2  # a killed process has its exit status by then: the kernel closes its socket just before


class MatcherClient:
    def __init__(self, settings: MatcherSettings, memory_fd: int, command: Sequence[str]) -> None:
        """command: arguments of the Python interpreter."""
        self.process, ours = start_child(command, [memory_fd], TOKENIZERS_PARALLELISM="false")
        self._frames: FrameSocket[FromMatcher] = FrameSocket(ours, msgspec.msgpack.Decoder(FromMatcher))
        self.is_ready, self.started_s = False, time.monotonic()
        self.failure = ""  # the reason that the engine cannot be loaded
        self._frames.send(settings)

    @property
    def is_alive(self) -> bool:
        """False as soon as the kernel has closed the process's socket and all its answers are read."""
        return self._frames.is_open

    def send(self, frame: ToMatcher) -> None:
        """Never waits. A frame to a process that has ended is lost."""
        self._frames.send(frame)

    def receive(self) -> list[AboutSlot]:
        """Returns what the process has to say about slots."""
        about_slots: list[AboutSlot] = []
        for frame in self._frames.receive():
            if isinstance(frame, EngineReady):
                self.is_ready = True
            elif isinstance(frame, EngineFailed):
                self.failure = frame.cause
            else:
                about_slots.append(frame)
        return about_slots

    def was_killed(self) -> bool:
        """Whether a signal from outside has ended the process, which is not alive."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return ended_from_outside(self.process.wait(EXIT_S))
        return False

    def kill(self) -> None:
        """Ends the process at once, if it has not ended."""
        self._frames.close()
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """The process ends by itself when its socket is closed."""
        self._frames.close()
        end_child(self.process)

"""Shared by the launcher's tests: a deployment of stand-ins, and a display that records its calls."""

import sys
from pathlib import Path

from blockyard.services.launcher.supervision.child import command
from blockyard.services.launcher.supervision.ring import local_bus
from blockyard.shared.config import parsed_flags
from blockyard.shared.config.checkpoint import Checkpoint
from blockyard.shared.config.resolve import Deployment, resolve

STAND_IN = Path(__file__).with_name("stand_in.py")


def deployment(folder: Path, *flags: str) -> Deployment:
    values = parsed_flags.Values(parsed_flags.from_command_line(["--model", "m", "--log-level", "error", *flags])[0])
    model = Checkpoint(name="m", path=folder, tokenizer_path=folder)
    return resolve(values, model, local_bus(folder))


def stand_in(service: str, settings: Path) -> list[str]:
    """The command of a service: the registry is real, the others are stand-ins."""
    if service == "message_bus":
        return command(service, settings)
    return [sys.executable, str(STAND_IN), service, str(settings)]


class Recorder:
    """A display that records its calls."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.phases: list[tuple[str, str, float]] = []
        self.were_ready: list[str] = []

    def phase(self, name: str, phase: str, progress: float) -> None:
        self.phases.append((name, phase, progress))

    def ready(self, name: str, seconds: float) -> None:
        assert seconds >= 0
        self.were_ready.append(name)

    def say(self, line: str) -> None:
        self.said.append(line)

    def close(self) -> None:
        pass

"""Files of what was measured on a machine, so that a later start need not measure it again."""

import logging
import os
from pathlib import Path
from typing import TypeVar

import msgspec

log = logging.getLogger(__name__)

Content = TypeVar("Content", bound=msgspec.Struct)


def read_measured(path: Path, kind: type[Content], what: str) -> Content | None:
    """None if the file is missing or unreadable. what: was measured, for the log."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as e:
        log.warning("%s cannot be used, %s are measured anew: %s", path, what, e)
        return None


def write_measured(path: Path, content: msgspec.Struct, what: str) -> None:
    """Replaces the file atomically. If the folder is not writable, the next start measures again."""
    whole = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        whole.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1))
        whole.replace(path)
    except OSError as e:
        log.warning("%s cannot be written, the next start measures %s again: %s", path, what, e)

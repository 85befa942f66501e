"""The error tree. Messages contain the wrong value and fit in one line."""

from pathlib import Path
from typing import NamedTuple


class BlockyardError(Exception):
    """Base of all errors raised on purpose."""

    exit_code = 1  # of a process that ends because of it


class ConfigError(BlockyardError):
    """A flag, a file or an environment variable is wrong: starting again without a change cannot help."""

    exit_code = 2


class LoadError(BlockyardError):
    """The model, its tokenizer or the memory for them is missing or not usable."""

    exit_code = 3


class DeviceError(BlockyardError):
    """The compute device failed: the process ends, and may be started again."""

    exit_code = 4


class RankLostError(BlockyardError):
    """Another rank of this worker has ended, failed or hangs: all ranks end, and the worker may be started again."""

    exit_code = 4


class BatchError(BlockyardError):
    """A batch ended before its last line. What was answered is in its output.

    `cause` is for clients: it names no file of the server.
    """

    exit_code = 5

    def __init__(self, cause: str, path: Path | None = None) -> None:
        """path: of the file that failed."""
        super().__init__(cause if path is None else f"{path}: {cause}")
        self.cause = cause


class AdapterError(BlockyardError):
    """An adapter cannot be served. `field` names the wrong field of the request that asked for it."""

    def __init__(self, message: str, field: str = "lora_path") -> None:
        super().__init__(message)
        self.field = field


MAX_MESSAGE_CHARS = 1000  # of a RequestError: messages repeat values of clients
MAX_FIELD_CHARS = 300


class TooLong(NamedTuple):
    """The length of a prompt that does not fit the context."""

    num_tokens: int  # at least: a prompt that must be too long is not read to its end
    max_tokens: int


class RequestError(BlockyardError, ValueError):
    """A request cannot be served. `field` names the wrong field, `status` is the HTTP status.

    Also a ValueError, which users of the offline API expect. `code` is OpenAI's error code, if it does not follow from
    the status. The middle of a long message or field is left out. `retry_after_s` is set if a later repetition may
    succeed, and `too_long` if the prompt does not fit.
    """

    def __init__(
        self,
        message: str,
        field: str = "",
        status: int = 400,
        code: str | None = None,
        retry_after_s: float | None = None,
        too_long: TooLong | None = None,
    ) -> None:
        super().__init__(shortened(message, MAX_MESSAGE_CHARS))
        self.field = shortened(field, MAX_FIELD_CHARS)
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s
        self.too_long = too_long


def shortened(text: str, most: int) -> str:
    """A text of about `most` characters at the most, without its middle."""
    half = most // 2
    return text if len(text) <= most else f"{text[:half]} ... {text[-half:]}"


def not_built(field: str, instead: str = "") -> RequestError:
    """Returns the error for a known field that has no implementation yet. Ignoring it would give a wrong answer."""
    return RequestError(
        f"`{field}` is not built yet{'; ' + instead if instead else ''}", field, code="unsupported_parameter"
    )

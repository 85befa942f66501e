"""The errors of the product. Messages carry the value that was wrong and are fit to be shown as one line."""


class BlockyardError(Exception):
    """Base of all that is raised on purpose."""

    exit_code = 1  # of a process that ends because of it


class ConfigError(BlockyardError):
    """A flag, a file or an environment variable is wrong: starting again without a change cannot help."""

    exit_code = 2


class LoadError(BlockyardError):
    """The model, its tokenizer or the memory for them is not there or not usable."""

    exit_code = 3


class DeviceError(BlockyardError):
    """What computes failed, a GPU most likely: the process ends, and is worth starting again."""

    exit_code = 4


class RequestError(BlockyardError, ValueError):
    """A request cannot be served; `field` names what is wrong with it, `status` is the HTTP status.

    Also a ValueError, which users of the offline API expect. `code` is OpenAI's word for it, where there is one
    besides what follows from the status; it may help to ask again after `retry_after_s`.
    """

    def __init__(
        self,
        message: str,
        field: str = "",
        status: int = 400,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.field = field
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s


def not_built(field: str, instead: str = "") -> RequestError:
    """A field we know, whose effect we do not have: saying so beats an answer that ignored it."""
    return RequestError(
        f"`{field}` is not built yet{'; ' + instead if instead else ''}", field, code="unsupported_parameter"
    )

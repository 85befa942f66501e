"""Settings of a gateway that answers the lines of a file in place of listening."""

import msgspec


class BatchConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A batch in OpenAI's format. Lines of `input` that `output` already has are left out."""

    input: str  # path of a file with a request a line
    output: str  # path of the file that answers are appended to; it is made if it is missing
    max_lines: int = 512  # whose answers are computed at a time

    def __post_init__(self) -> None:
        if self.max_lines < 1:
            raise ValueError(f"batch.max_lines must be >= 1, got {self.max_lines}")

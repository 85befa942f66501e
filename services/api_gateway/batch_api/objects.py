"""The objects of OpenAI's API for files and batches, and the body that makes a batch."""

from typing import Annotated, Literal

import msgspec

ENDED = ("failed", "completed", "expired", "cancelled")
WINDOW_S = 24 * 3600


class ExpiresAfter(msgspec.Struct, frozen=True):
    """How long a file is kept: an hour to 30 days, if --batch-retention is not shorter."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, msgspec.Meta(ge=3600, le=30 * 24 * 3600)]


class FileObject(msgspec.Struct, frozen=True):
    id: str
    bytes: int
    created_at: int  # Unix seconds, as all times
    filename: str
    purpose: str
    expires_at: int
    object: str = "file"
    status: str = "processed"


class DeletedFile(msgspec.Struct, frozen=True):
    id: str
    object: str = "file"
    deleted: bool = True


class RequestCounts(msgspec.Struct, frozen=True):
    """Lines of the input; the completed ones are in the output file, the failed ones in the error file."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchFault(msgspec.Struct, frozen=True):
    """Why a whole batch failed."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchFaults(msgspec.Struct, frozen=True):
    data: list[BatchFault]
    object: str = "list"


class BatchObject(msgspec.Struct, frozen=True):
    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: str = "validating"
    errors: BatchFaults | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None
    object: str = "batch"

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED


class FileList(msgspec.Struct, frozen=True):
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


class BatchList(msgspec.Struct, frozen=True):
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


class CreateBatch(msgspec.Struct, frozen=True):
    """Makes a batch of an uploaded file."""

    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"]
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None

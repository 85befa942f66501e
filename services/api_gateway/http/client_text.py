"""Makes text of clients safe for log lines: escaped, on one line, and short."""

import logging

from aiohttp.http_exceptions import HttpProcessingError

MAX_CHARS = 200


def escaped(text: str) -> str:
    """Printable ASCII without line breaks, so that no request can forge a log line."""
    return text[:MAX_CHARS].encode("unicode_escape").decode("ascii")[:MAX_CHARS]


class MalformedRequests(logging.Filter):
    """Replaces aiohttp's traceback about a request that is not HTTP by one line."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            record.msg, record.args = f"malformed request: {escaped(' '.join(error.message.split()))}", None
            record.exc_info = record.exc_text = None
            record.levelno, record.levelname = logging.WARNING, "WARNING"
        return True


def http_logger() -> logging.Logger:
    made = logging.getLogger("blockyard.http")
    if not any(isinstance(each, MalformedRequests) for each in made.filters):
        made.addFilter(MalformedRequests())
    return made

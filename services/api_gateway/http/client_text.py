"""Text of clients in log lines: escaped, of one line, and short."""

import logging

from aiohttp.http_exceptions import HttpProcessingError

MAX_CHARS = 200


def escaped(text: str) -> str:
    """Printable ASCII without line breaks, so that no request can write a log line of its own."""
    return text[:MAX_CHARS].encode("unicode_escape").decode("ascii")[:MAX_CHARS]


class MalformedRequests(logging.Filter):
    """Makes one line of aiohttp's traceback about a request that is not HTTP."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            record.msg, record.args = f"malformed request: {escaped(' '.join(error.message.split()))}", None
            record.exc_info = record.exc_text = None
            record.levelno, record.levelname = logging.WARNING, "WARNING"
        return True


def http_logger() -> logging.Logger:
    """The logger of the HTTP server."""
    made = logging.getLogger("blockyard.http")
    if not any(isinstance(each, MalformedRequests) for each in made.filters):
        made.addFilter(MalformedRequests())
    return made

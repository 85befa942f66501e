"""One log format for all processes: time, level, process name, text; to stderr."""

import logging
import sys

TRACE = 5
LEVELS = {
    "trace": TRACE,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}


def setup(name: str, level: str) -> None:
    """Sends the whole process's logging to stderr under `name`. `level` is a key of `LEVELS`."""
    logging.addLevelName(TRACE, "TRACE")
    handler = logging.StreamHandler(sys.stderr)
    text = f"%(asctime)s.%(msecs)03d %(levelname)-7s {name.replace('%', '%%')}: %(message)s"
    handler.setFormatter(logging.Formatter(text, "%Y-%m-%d %H:%M:%S"))
    logging.basicConfig(level=LEVELS[level], handlers=[handler], force=True)
    # Libraries log too much on these levels.
    for noisy in ("asyncio", "aiohttp.access", "filelock", "httpx", "urllib3"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, LEVELS[level]))

"""One log format for all processes: time, level, process name, text; to stderr. A file may replace it."""

import logging
import logging.config
import sys
from pathlib import Path

import msgspec

from blockyard.shared.errors import ConfigError

TRACE = 5
LEVELS = {
    "trace": TRACE,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}


def setup(name: str, level: str, config_file: str = "") -> None:
    """Sends the whole process's logging to stderr under `name`. `level` is a key of `LEVELS`.

    config_file: JSON of `logging.config.dictConfig`, applied on top; empty: none. Raises ConfigError.
    """
    logging.addLevelName(TRACE, "TRACE")
    handler = logging.StreamHandler(sys.stderr)
    text = f"%(asctime)s.%(msecs)03d %(levelname)-7s {name.replace('%', '%%')}: %(message)s"
    handler.setFormatter(logging.Formatter(text, "%Y-%m-%d %H:%M:%S"))
    logging.basicConfig(level=LEVELS[level], handlers=[handler], force=True)
    # Libraries log too much on these levels.
    for noisy in ("asyncio", "aiohttp.access", "filelock", "httpx", "urllib3"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, LEVELS[level]))
    if config_file:
        _apply(config_file, name)


def _apply(config_file: str, name: str) -> None:
    """Raises ConfigError."""
    make = logging.getLogRecordFactory()

    def make_named(*args: object, **kwargs: object) -> logging.LogRecord:
        record = make(*args, **kwargs)
        record.processName = name
        return record

    try:
        config = msgspec.json.decode(Path(config_file).read_bytes(), type=dict[str, object])
        logging.config.dictConfig({"disable_existing_loggers": False} | config)
    except (OSError, ValueError, TypeError, AttributeError, ImportError) as e:  # what dictConfig raises
        raise ConfigError(f"--log-config-file {config_file}: {e.__cause__ or e}") from e
    logging.setLogRecordFactory(make_named)

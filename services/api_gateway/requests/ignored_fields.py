"""Reports unknown request fields that were ignored: in a response header, and once per name in the log."""

import logging
from collections.abc import Iterable
from itertools import islice
from urllib.parse import quote

from blockyard.shared.ring_client.request_fields.known_fields import MAX_NAME_CHARS

log = logging.getLogger(__name__)

HEADER = "x-blockyard-ignored"
MAX_HEADER_CHARS = 1024
MAX_LOGGED = 256  # names that are remembered; further ones are not logged


class IgnoredFields:
    """Field names come from the client: they are percent-encoded, and few are kept."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def note(self, names: Iterable[str]) -> str:
        """Logs new names. Returns the header's value, which ends in `...` where names are left out."""
        cut_names = dict.fromkeys(name[:MAX_NAME_CHARS] for name in names)  # each once
        escaped = [quote(name, safe="", errors="replace") or '""' for name in islice(cut_names, MAX_LOGGED + 1)]
        for name in escaped:
            self._log_once(name)
        value = ", ".join(escaped)
        if len(value) <= MAX_HEADER_CHARS and len(escaped) == len(cut_names):
            return value
        cut = value[: MAX_HEADER_CHARS - len(", ...")]
        return cut.rpartition(", ")[0] + ", ..."

    def _log_once(self, name: str) -> None:
        if name in self._logged or len(self._logged) > MAX_LOGGED:
            return
        self._logged.add(name)
        if len(self._logged) > MAX_LOGGED:
            log.warning("more than %d unknown request fields were ignored: new ones are not logged", MAX_LOGGED)
        else:
            log.warning("requests have an unknown field that is ignored: %s", name)

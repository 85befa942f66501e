"""`blockyard ring`: who is in the ring; with --check, whether this host's part in it is ready."""

import os
import socket
import sys
from collections.abc import Sequence

from blockyard.services.launcher import sources
from blockyard.services.launcher.run_service import bus_config
from blockyard.shared import ring_query
from blockyard.shared.errors import ConfigError

ANSWER_S = 5.0


def main(args: Sequence[str]) -> int:
    """Prints a line a member. With --check: nothing and 0, or why not and 1. Raises BlockyardError."""
    check = "--check" in args
    values, positionals, _ = sources.read([word for word in args if word != "--check"], os.environ)
    if positionals:
        raise ConfigError(f"expected flags and --check, got {positionals[0]}")
    found = ring_query.ask_members(bus_config(values), ANSWER_S)
    if not check:
        print("\n".join(ring_query.as_lines(found.members)))
        return 0
    reason = ring_query.not_ready(found.members, values.maybe("advertise", str) or socket.gethostname())
    if reason:
        print(reason, file=sys.stderr)
    return 1 if reason else 0

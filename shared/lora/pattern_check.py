"""Refuses a config whose regular expressions take too long to match, before they are matched in this process.

Backtracking may take exponential time, and `re` holds the lock of the interpreter all the while.
"""

import json
import re
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

from blockyard.shared.errors import AdapterError
from blockyard.shared.lora import match_names
from blockyard.shared.lora.adapter_config import CONFIG_FILE, AdapterConfig

CPU_S = 1  # of all matches of a config ...
MATCHES_A_S = 50_000  # ... beside that of so many matches; usual ones take a hundredth
MOST_MATCHES = 10_000_000  # some seconds, of patterns that are names
_LITERAL = re.compile(r"(?:\w|\\?\.|-)*")  # a name, as nearly all are, is matched quickly


def check_patterns(config: AdapterConfig, names: Collection[str]) -> None:
    """Matches all names in another process, if an expression is more than a name. Raises AdapterError.

    Names are quick, and their number is limited.
    """
    if (count := len(config.patterns()) * len(names)) > MOST_MATCHES:
        raise AdapterError(f"{CONFIG_FILE}: its patterns and {len(names)} modules need {count} matches: too many")
    patterns = [one for one in config.patterns() if not _LITERAL.fullmatch(one.given)]
    if not patterns:
        return
    cpu_s = CPU_S + len(patterns) * len(names) // MATCHES_A_S
    columns = [(one.field, one.expression, one.is_whole) for one in patterns]
    asked = json.dumps({"patterns": columns, "names": list(names), "cpu_s": cpu_s})
    command = [sys.executable, "-I", "-S", str(Path(match_names.__file__))]
    done = subprocess.run(command, input=asked.encode(), stdout=subprocess.PIPE, check=False)
    if done.returncode:
        slow = patterns[int(done.stdout.split()[-1])] if done.stdout else patterns[0]
        cause = f"the names of the adapter's modules cannot be matched with it in {cpu_s} s of CPU time"
        raise AdapterError(f"{CONFIG_FILE}: {slow.field} {slow.given!r}: {cause}")

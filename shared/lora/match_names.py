"""Matches names with regular expressions: `python match_names.py`, a process of its own, which may take for ever.

Reads a JSON object from stdin: `patterns`, each a field of a config, an expression, and whether it has to match whole
names; `names`; and `cpu_s`, the CPU time after which the kernel ends the process. Writes the number of each pattern
before it is matched. Imports the standard library alone, to start quickly.
"""

import json
import re
import resource
import sys


def main() -> None:
    asked = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (asked["cpu_s"], asked["cpu_s"]))
    for number, (_, expression, is_whole) in enumerate(asked["patterns"]):
        print(number, flush=True)
        compiled = re.compile(expression)
        match = compiled.fullmatch if is_whole else compiled.match
        for name in asked["names"]:
            match(name)


if __name__ == "__main__":
    main()

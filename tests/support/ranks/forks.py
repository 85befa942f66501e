"""A process that has loaded modules for many tests: each piece of code runs in a fork of it, which loads none again.

A process of tests is no such one: it has threads, which a fork lacks.
"""

import atexit
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

SERVE = """
import json, os, sys, traceback

for line in sys.stdin:
    code, folder = json.loads(line)
    pid = os.fork()
    if pid:
        print(os.waitpid(pid, 0)[1], flush=True)
        continue
    for number, name in ((1, "output"), (2, "errors")):
        os.dup2(os.open(os.path.join(folder, name), os.O_CREAT | os.O_WRONLY), number)
    try:
        exec(code, globals())
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)
"""


class Forks:
    """It ends with the process that has made it."""

    def __init__(self, loads: str, env: Mapping[str, str]) -> None:
        """loads: the code whose names are known to the code of each fork."""
        command = [sys.executable, "-P", "-c", loads + SERVE]
        self._process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        atexit.register(self._process.communicate)

    def run(self, code: str, folder: Path) -> str:
        """Returns what the code prints. folder: for its output, an empty one."""
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None and answers is not None
        print(json.dumps([code, str(folder)]), file=requests, flush=True)
        status = answers.readline().strip()
        assert status == "0", (folder / "errors").read_text("utf-8")
        return (folder / "output").read_text("utf-8")

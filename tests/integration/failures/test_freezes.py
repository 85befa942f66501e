"""Services that stand still for seconds under load: only one that exceeds --hung-timeout is killed, no stream is cut.

`tests/bench/serving/bench_freezes.py` does the same many times.
"""

import asyncio
from pathlib import Path

from freezes import MOCK, NOTHING, FrozenRing
from rig import serve

HUNG_TIMEOUT_S = 10.0
PLAN = [
    ("message_bus", 8.5),  # longer than the silence after which members connect again
    ("scheduler", 5.0),
    ("api_gateway", 5.0),
    ("detokenizer", 2.0),
    ("gpu_worker", 11.5),  # is killed
    (NOTHING, 2.0),
]


def test_only_what_stands_still_for_too_long_is_killed_and_no_stream_is_cut(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with serve("demo", *MOCK, "--hung-timeout", str(HUNG_TIMEOUT_S), log=log) as server:
        freezes = asyncio.run(FrozenRing(server, num_clients=6).run(PLAN))
    lines = log.read_text("utf-8", "replace")
    faults = {f"{freeze.service}, {freeze.seconds} s": freeze.faults(HUNG_TIMEOUT_S) for freeze in freezes}
    assert not any(faults.values()), f"{faults}\n{lines}"
    assert [name for freeze in freezes for name in freeze.killed] == ["gpu_worker 0"]
    assert lines.count("is hung") == 1

from pathlib import Path

import pytest

from blockyard.shared.process.cores import usable_cores


def test_a_container_may_have_fewer_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    limit = tmp_path / "cpu.max"
    assert usable_cores(limit) == 8
    for text, cores in (("max 100000\n", 8), ("250000 100000\n", 2), ("50000 100000\n", 1), ("9900000 100000\n", 8)):
        limit.write_text(text)
        assert usable_cores(limit) == cores

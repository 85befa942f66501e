"""How many threads and cores the worker takes."""

from types import SimpleNamespace

import pytest

from blockyard.services.gpu_worker import cores


@pytest.mark.parametrize(
    ("version", "threads"), [((3, 11, 0), 1), ((3, 11, 7), 1), ((3, 11, 8), 16), ((3, 12, 0), 16), ((3, 13, 2), 16)]
)
def test_one_thread_compiles_where_ast_parse_is_not_thread_safe(
    version: tuple[int, int, int], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "sys", SimpleNamespace(version_info=version))
    assert cores.compile_threads(16) == threads

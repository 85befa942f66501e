"""No garbage is collected while modules are loaded."""

import gc

import pytest

from blockyard.shared.process.settings import loading_modules


def test_what_a_block_makes_is_never_looked_at_again() -> None:
    frozen = gc.get_freeze_count()
    with loading_modules():
        made = [[number] for number in range(1000)]
        assert not gc.isenabled()
    assert gc.isenabled() and gc.get_freeze_count() >= frozen + len(made)


def test_garbage_is_collected_behind_a_module_that_cannot_be_loaded() -> None:
    with pytest.raises(ImportError), loading_modules():
        raise ImportError
    assert gc.isenabled()

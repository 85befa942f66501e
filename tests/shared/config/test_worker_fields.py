"""The scope of block hashes. Workers' other fields are tested from flags to settings in `test_resolve.py`."""

import pytest

from blockyard.shared.config import parsed_flags
from blockyard.shared.config.worker_fields import kv_scope

FP8 = ("--kv-cache-dtype", "fp8")


@pytest.mark.parametrize(
    ("args", "scope"),
    [
        ((), "auto"),
        (FP8, "fp8"),
        ((*FP8, "--calculate-kv-scales"), "fp8 calculated"),
        ((*FP8, "--quantization-param-path", "/scales.json"), "fp8 /scales.json"),
    ],
)
def test_the_scope_names_the_dtype_and_scales_of_the_kv_cache(args: tuple[str, ...], scope: str) -> None:
    """The words are fixed, because processes of two versions may run side by side and have to name a block alike."""
    assert kv_scope(parsed_flags.Values(parsed_flags.from_command_line(args)[0])) == scope

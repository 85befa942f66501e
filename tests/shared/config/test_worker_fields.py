"""The scope of block hashes. Workers' other fields are tested from flags to settings in `test_resolve.py`."""

import pytest

from blockyard.shared.config import parsed_flags
from blockyard.shared.config.worker_fields import kv_fields, kv_notes, kv_scope
from blockyard.shared.errors import ConfigError

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
    assert kv_scope(values(args), {}) == scope


def values(args: tuple[str, ...]) -> parsed_flags.Values:
    return parsed_flags.Values(parsed_flags.from_command_line(args)[0])


CUDA = ("--device", "cuda")
SCHEME = {"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}}


@pytest.mark.parametrize(
    "said",
    [
        *(SCHEME, {"kv_cache_quant_algo": "FP8"}, {"kv_cache_scheme": {"num_bits": "8", "type": "FLOAT"}}),
        {"quant_method": "fp8", "kv_cache_scheme": "static"},
    ],
)
def test_a_checkpoint_decides_the_dtype_of_the_kv_cache_on_gpus(said: dict[str, object]) -> None:
    assert kv_fields(values(CUDA), said) == {"kv_cache_dtype": "fp8"}
    assert kv_scope(values(CUDA), said) == "fp8"
    assert "KV cache: fp8 on GPUs" in kv_notes(values(CUDA), said)[0]
    for args in (("--device", "cpu"), (*CUDA, "--dtype", "float32"), (*CUDA, "--worker-cls", "mock")):
        assert kv_fields(values(args), said) == {"kv_cache_dtype": "auto"}
        assert kv_scope(values(args), said) == "auto"
        assert kv_notes(values(args), said) == []
    asked = (*CUDA, "--kv-cache-dtype", "fp8_e5m2")
    assert kv_fields(values(asked), said) == {"kv_cache_dtype": "fp8_e5m2"}
    assert kv_notes(values(asked), said) == []


@pytest.mark.parametrize(
    "said",
    [
        *({}, {"kv_cache_scheme": {"num_bits": 8, "type": "int"}}, {"kv_cache_quant_algo": "NVFP4"}),
        {"quant_method": "fp8", "kv_cache_scheme": None},
        {"quant_method": "modelopt", "kv_cache_scheme": "NVFP4"},
    ],
)
def test_other_kv_caches_of_checkpoints_have_16_bits(said: dict[str, object]) -> None:
    assert kv_fields(values(CUDA), said) == {"kv_cache_dtype": "auto"}


def test_scales_of_heads_are_refused() -> None:
    said = {"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "attn_head"}}
    with pytest.raises(ConfigError, match="kv_cache_scheme has scales of heads"):
        kv_fields(values(CUDA), said)

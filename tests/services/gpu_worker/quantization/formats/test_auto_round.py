"""Files of AutoRound: which matrices have which settings. Their packings are those of GPTQ and AWQ."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_words import pack_words
from quantized_checkpoint import Checkpoints, Sample, check_logits, is_projection, write
from torch import Tensor

from blockyard.services.gpu_worker.quantization.formats.auto_round import AutoRoundScheme
from blockyard.services.gpu_worker.quantization.kept.w4a16 import W4A16
from blockyard.services.gpu_worker.quantization.kept.w8a16 import W8A16
from blockyard.services.gpu_worker.quantization.scheme import Matrix
from blockyard.shared.errors import ConfigError


def write_auto_round(folder: Path, packing: Mapping[str, str]) -> Checkpoints:
    """packing: fields of quantization_config."""
    packing_format = packing.get("packing_format", "auto_round:auto_gptq")
    less = int(packing_format == "auto_round:auto_gptq")

    def store(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        if not is_projection(name) or name.endswith("k_proj"):
            return None
        outputs, inputs = weight.shape
        codes, zeros = torch.randint(0, 16, (outputs, inputs)), torch.randint(1, 16, (outputs, inputs // 32))
        scales = (torch.rand(zeros.shape) * 0.03).half()
        numbers = (codes - zeros.repeat_interleave(32, 1)) * scales.float().repeat_interleave(32, 1)
        if "awq" in packing_format:
            turn = [0, 2, 4, 6, 1, 3, 5, 7]
            words = [pack_words(one.t().unflatten(1, (-1, 8))[..., turn].flatten(1), 4) for one in (codes, zeros)]
        else:
            words = [pack_words(codes, 4).t(), pack_words(zeros.t() - less, 4)]
        own = {"qweight": words[0], "qzeros": words[1], "scales": scales.t()}
        return {f"{name}.{key}": value for key, value in own.items()}, numbers

    rules = {f"model.layers.{i}.self_attn.k_proj": {"bits": 16, "data_type": "fp"} for i in range(3)}
    said = {"quant_method": "intel/auto-round", "bits": 4, "group_size": 32, "sym": False, "extra_config": rules}
    return write(folder, "llama", store, {"config.json": {"quantization_config": said | packing}})


Q, UP = "model.layers.1.self_attn.q_proj", "model.layers.0.mlp.up_proj"


def find_form(name: str, **said: Any) -> Any:
    scheme = AutoRoundScheme({"quant_method": "auto-round", "bits": 4, "group_size": 32, **said}, torch.float32)
    found = scheme.stored(Matrix(name=name, outputs=64, inputs=64))
    return None if found is None else found.form


SAMPLES = {"auto-round": Sample(lambda folder: write_auto_round(folder, {}))}


def test_settings_of_matrices() -> None:
    kept = W4A16(32)
    rules = {
        Q: {"bits": 16},
        "lm_head": {"bits": 8, "sym": False},
        r".*\.0\.mlp\.up.*": {"group_size": 16, "sym": False},
    }
    assert find_form(Q) == find_form(UP) == kept
    assert find_form("lm_head") is find_form("model.layers.0.mlp.gate") is None
    assert find_form(Q, extra_config=rules) is None
    assert find_form(f"language_model.{Q}", extra_config=rules) is None
    assert find_form("model.layers.11.self_attn.q_proj", extra_config=rules) == kept
    assert find_form(UP, extra_config=rules) == W4A16(16, torch.uint8)
    assert find_form("lm_head", extra_config=rules) == W8A16(torch.uint8, 32, True, torch.float16)


def test_an_expression_is_found_anywhere_in_a_name() -> None:
    rules = {r"mlp\.(gate|up)": {"bits": 8}, "mlp{9}": {"bits": 16}}
    assert find_form(UP, extra_config=rules) == W8A16(torch.int8, 32, False, torch.float16)
    assert find_form(Q, extra_config=rules) == W4A16(32)
    scheme = AutoRoundScheme({"bits": 4, "group_size": 32, "extra_config": rules}, torch.float32)
    scheme.stored(Matrix(name=UP, outputs=64, inputs=64))
    assert [name for one in scheme.patterns() for name in one.unused()] == ["mlp{9}"]


@pytest.mark.parametrize("names", ["model.layers.1,model.layers.2", ["model.layers.1"], [["model.layers.1"]]])
def test_names_of_blocks(names: Any) -> None:
    for key in ("block_name_to_quantize", "to_quant_block_names"):
        assert find_form(Q, **{key: names}) == W4A16(32)
        assert find_form(UP, **{key: names}) is None
        assert find_form(UP, extra_config={UP: {"bits": 8}}, **{key: names}) is not None


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"bits": 5}, "bits 5 is none of"),
        ({"packing_format": "auto_round:fp8"}, "packing_format 'auto_round:fp8': only layouts of GPTQ and AWQ"),
        ({"data_type": "mx_fp"}, "data_type 'mx_fp': only int is supported"),
        ({"extra_config": {"(": {"bits": 4}}}, "not a regular expression"),
        ({"packing_format": "auto_round:auto_awq", "bits": 8}, "bits 8: weights of AWQ have 4"),
    ],
)
def test_wrong_settings_are_refused(fields: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        find_form(Q, **fields)


@pytest.mark.parametrize(
    "packing",
    [
        *({}, {"backend": "auto"}, {"backend": "auto_round:gptq:exllamav2"}, {"packing_format": "auto_round:auto_awq"}),
        *({"packing_format": "auto_round"}, {"packing_format": "auto_round:gptqmodel"}),
    ],
)
def test_logits(tmp_path: Path, packing: dict[str, str]) -> None:
    check_logits(write_auto_round(tmp_path, packing))

"""GGUF files, written and judged by the package gguf."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_files import SAID, draw, write_gguf
from model_logits import all_logits
from quantized_checkpoint import IDS
from tiny_models import start
from torch import Tensor

from blockyard.services.gpu_worker.loading.tensor_headers import TensorHeader, TensorHeaders
from blockyard.services.gpu_worker.quantization.formats.gguf import GgufScheme
from blockyard.services.gpu_worker.quantization.formats.layouts.ggml_blocks import TYPES
from blockyard.services.gpu_worker.quantization.kept.w4a16 import W4A16
from blockyard.services.gpu_worker.quantization.kept.w8a16 import W8A16
from blockyard.services.gpu_worker.quantization.scheme import Matrix
from blockyard.shared.errors import ConfigError, LoadError
from blockyard.shared.quantization_settings.files import read_quantization


def scheme_of(kind: str, stored: Tensor, inputs: int, dtype: torch.dtype) -> Any:
    headers = TensorHeaders([("h.0.a.weight", TensorHeader(tuple(stored.shape), torch.uint8, kind))])
    return GgufScheme(dtype).stored(Matrix(name="h.0.a", outputs=len(stored), inputs=inputs, headers=headers))


@pytest.mark.parametrize("name", TYPES)
def test_blocks_with_a_kept_form(name: str) -> None:
    stored = draw(Kind[name], 6, 512)
    want = torch.from_numpy(gguf.quants.dequantize(stored, Kind[name]))
    for dtype, most in ((torch.float32, 2e-6), (torch.bfloat16, 2e-3)):
        made = scheme_of(name, torch.from_numpy(stored), 512, dtype)
        kept = {
            key: value.to(made.form.tensors()[key].dtype)
            for key, value in made.to_kept({"weight": torch.from_numpy(stored)}).items()
        }
        assert isinstance(made.form, W4A16 if "4" in name else W8A16)
        assert {key: value.shape for key, value in kept.items()} == {
            key: one.shape(6, 512) for key, one in made.form.tensors().items()
        }
        got = made.form.dequantize(kept, 512, torch.float32)
        assert float((got - want).abs().max() / want.abs().max()) < most


def test_zeros_that_16_bits_do_not_hold() -> None:
    """Where the scale is tiny beside the offset, the offset alone counts."""
    stored = draw(Kind.Q4_1, 2, 64)
    blocks = stored.reshape(2, 2, 20)
    blocks[..., :2] = np.full((2, 2, 1), 6e-8, np.float16).view(np.uint8)
    blocks[..., 2:4] = np.full((2, 2, 1), 0.5, np.float16).view(np.uint8)
    want = torch.from_numpy(gguf.quants.dequantize(stored, Kind.Q4_1))
    made = scheme_of("Q4_1", torch.from_numpy(stored), 64, torch.bfloat16)
    kept = {key: value.half() if value.is_floating_point() else value
            for key, value in made.to_kept({"weight": torch.from_numpy(stored)}).items()}  # fmt: skip
    torch.testing.assert_close(made.form.dequantize(kept, 64, torch.float32), want, rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    ("model", "architecture", "kind"),
    [
        *(("llama", "llama", kind) for kind in (Kind.Q4_0, Kind.Q5_1, Kind.Q8_0, Kind.IQ4_NL)),
        *(("qwen2", "qwen2", kind) for kind in (Kind.Q4_0, Kind.Q5_0)),
        ("qwen3", "qwen3", Kind.Q4_1),
    ],
)
def test_logits(tmp_path: Path, model: str, architecture: str, kind: Kind) -> None:
    plain, packed = write_gguf(tmp_path, model, kind, architecture)
    assert read_quantization(packed, {}).said == {"quant_method": "gguf"}
    assert read_quantization(plain, {}).said == {}
    for load_format in ("auto", "gguf"):
        runner = start(packed, max_model_len=64, config_overrides=SAID, load_format=load_format)
        like = start(plain, max_model_len=64)
        torch.testing.assert_close(all_logits(runner, IDS, [12]), all_logits(like, IDS, [12]), atol=1e-4, rtol=1e-4)
    [line] = [one for one in runner.model.table.describe_unused() if "that are dequantized at load take" in one]
    embedding = runner.model.table.places["model.embed_tokens.weight"].target.numel()
    numbers, size_bytes = gguf.GGML_QUANT_SIZES[kind]
    if kind != Kind.IQ4_NL:  # all other types have a form
        in_file = embedding / numbers * size_bytes
        assert f"take {embedding * 4 / 1e9:.3f} GB, {in_file / 1e9:.3f} GB in the files: model.embed_tokens" in line
    start(packed, max_model_len=64, config_overrides=SAID, load_format="dummy")


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    _, packed = write_gguf(tmp_path / "a", "llama", Kind.Q8_0, "llama", **{"blk.0.ffn_gate_exps.weight": np.ones(2)})
    with pytest.raises(LoadError, match=r"model.gguf: a tensor blk\.0\.ffn_gate_exps\.weight is not known"):
        start(packed, config_overrides=SAID)
    _, packed = write_gguf(tmp_path / "b", "llama", Kind.Q8_0, "phi3")
    with pytest.raises(LoadError, match=r"general.architecture is 'phi3'; llama, qwen2, qwen3 are read"):
        start(packed, config_overrides=SAID)
    file = packed / "model.gguf"
    (packed / "other.gguf").write_bytes(file.read_bytes())
    with pytest.raises(LoadError, match=r"several \.gguf files: model\.gguf, other\.gguf"):
        start(packed, config_overrides=SAID)
    (packed / "other.gguf").unlink()
    for content in (b"none", b"", file.read_bytes()[:5000]):
        file.write_bytes(content)
        with pytest.raises(LoadError, match=r"model\.gguf is not a usable GGUF file"):
            start(packed, config_overrides=SAID)
    with pytest.raises(ConfigError, match="32 inputs are no whole blocks of Q4_K"):
        scheme_of("Q4_K", torch.zeros(2, 144, dtype=torch.uint8), 32, torch.float32)
    wrong = torch.from_numpy(draw(Kind.Q8_0, 2, 64))
    wrong.view(2, 2, 34)[0, 0, :2] = 255
    with pytest.raises(LoadError, match=r"h\.0\.a\.weight: the checkpoint has a scale of nan"):
        scheme_of("Q8_0", wrong, 64, torch.float32).to_kept({"weight": wrong})

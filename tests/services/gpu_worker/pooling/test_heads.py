"""Dense and Normalize modules against the folders and numbers of sentence-transformers."""

from pathlib import Path

import pytest
import torch
from sentence_folders import save_sentence_folder
from sentence_transformers.base.modules import Dense, Normalize
from sentence_transformers.sentence_transformer.modules import Pooling

from blockyard.services.gpu_worker.pooling.heads import VectorHead
from blockyard.shared.config.pooling.modes import PoolingMode
from blockyard.shared.config.pooling.pooler_config import PoolerOverrides
from blockyard.shared.config.pooling.pooling_choice import PoolingChoice, choose_pooling
from blockyard.shared.config.pooling.sentence_modules import read_modules
from blockyard.shared.config.pooling.sentence_settings import read_settings
from blockyard.shared.errors import LoadError

CPU = torch.device("cpu")


def _head(folder: Path) -> VectorHead:
    cut = read_settings(folder).truncate_dim
    choice = choose_pooling(PoolingMode.CLS, 32, read_modules(folder), PoolerOverrides(), truncate_dim=cut)
    return VectorHead(choice, folder, CPU)


@pytest.mark.parametrize("use_residual", [False, True])
@pytest.mark.parametrize("ends", [[], ["normalize"]])
def test_as_sentence_transformers(ends: list[str], use_residual: bool, tmp_path: Path) -> None:
    modules = [
        Pooling(32, "mean"),
        Normalize(),
        Dense(32, 48, activation_function=torch.nn.GELU(), use_residual=use_residual),
        Dense(48, 48, bias=False, use_residual=use_residual),
        *(Normalize() for _ in ends),
    ]
    model = save_sentence_folder(tmp_path, *modules)
    rows = torch.randn(5, 32)
    features = {"sentence_embedding": rows}
    for module in list(model)[2:]:
        features = module(features)
    with torch.no_grad():
        got = _head(tmp_path)(rows)
    torch.testing.assert_close(got, features["sentence_embedding"].detach(), atol=1e-6, rtol=1e-5)


def test_dimensions_are_cut_then_normalized() -> None:
    head = VectorHead(PoolingChoice(modes=(PoolingMode.CLS,), source="", width=8, normalize=True), Path(), CPU)
    rows = torch.randn(3, 8)
    got = head(rows, 4)
    torch.testing.assert_close(got, rows[:, :4] / rows[:, :4].norm(dim=-1, keepdim=True))
    torch.testing.assert_close(head(rows, 4, False), rows[:, :4])
    torch.testing.assert_close(head(rows).norm(dim=-1), torch.ones(3))


@pytest.mark.parametrize("modules", [[], [Normalize()], [Dense(32, 20), Normalize()]])
def test_vectors_that_the_folder_cuts(modules: list[torch.nn.Module], tmp_path: Path) -> None:
    model = save_sentence_folder(tmp_path, Pooling(32, "mean"), *modules, truncate_dim=12)
    features = model.preprocess(["aa ab ac", "ba"])
    with torch.no_grad():
        pooled = model[1](model[0](features))["sentence_embedding"]
        got = _head(tmp_path)(pooled)
    torch.testing.assert_close(got, torch.from_numpy(model.encode(["aa ab ac", "ba"])), atol=1e-6, rtol=1e-5)
    asked = _head(tmp_path)(pooled, 12, True)
    torch.testing.assert_close(asked, torch.nn.functional.normalize(got, dim=-1))


def test_weights_that_do_not_fit(tmp_path: Path) -> None:
    save_sentence_folder(tmp_path, Pooling(32, "mean"), Dense(32, 8))
    path = tmp_path / "2_Dense" / "model.safetensors"
    save_sentence_folder(tmp_path / "other", Pooling(32, "mean"), Dense(32, 9))
    path.write_bytes((tmp_path / "other" / "2_Dense" / "model.safetensors").read_bytes())
    with pytest.raises(LoadError, match=r"linear.weight is \[9, 32\], config.json means \[8, 32\]"):
        _head(tmp_path)
    save_sentence_folder(tmp_path / "biased", Pooling(32, "mean"), Dense(32, 8))
    path.write_bytes((tmp_path / "biased" / "2_Dense" / "model.safetensors").read_bytes())
    config = tmp_path / "2_Dense" / "config.json"
    config.write_text(config.read_text().replace('"bias": true', '"bias": false'))
    with pytest.raises(LoadError, match=r"config.json means no linear.bias"):
        _head(tmp_path)
    path.write_bytes(b"junk")
    with pytest.raises(LoadError, match="cannot read"):
        _head(tmp_path)

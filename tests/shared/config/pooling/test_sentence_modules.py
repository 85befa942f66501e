"""Folders that sentence-transformers itself writes, and folders that contradict themselves."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_folders import save_sentence_folder
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize
from sentence_transformers.sentence_transformer.modules import Pooling

from blockyard.shared.config.pooling.modes import OF_SENTENCES, PoolingMode
from blockyard.shared.config.pooling.sentence_modules import DenseModule, NormalizeModule, read_modules, width_behind
from blockyard.shared.errors import ConfigError

WIDTH = 32


@pytest.mark.parametrize("modes", [*([mode] for mode in OF_SENTENCES), [PoolingMode.MAX, PoolingMode.CLS]])
def test_reads_pooling_that_the_package_saves(modes: Sequence[PoolingMode], tmp_path: Path) -> None:
    names = [mode.value for mode in modes]
    save_sentence_folder(tmp_path, Pooling(WIDTH, names if len(names) > 1 else names[0], include_prompt=False))
    found = read_modules(tmp_path)
    assert found is not None
    assert found.pooling is not None
    assert found.pooling.modes == tuple(modes)
    assert found.pooling.width == WIDTH
    assert not found.pooling.include_prompt
    assert width_behind(found) == WIDTH * len(modes) and not found.joins_dense


def test_reads_modules_behind_the_pooling(tmp_path: Path) -> None:
    dense = Dense(2 * WIDTH, 8, bias=False, activation_function=torch.nn.GELU())
    save_sentence_folder(tmp_path, Pooling(WIDTH, ["mean", "max"]), Dense(2 * WIDTH, 2 * WIDTH), dense, Normalize())
    found = read_modules(tmp_path)
    assert found is not None
    first, second, last = found.behind
    assert isinstance(first, DenseModule)
    assert (first.activation, first.bias, first.folder) == ("Tanh", True, "2_Dense")
    assert isinstance(second, DenseModule)
    assert (second.activation, second.bias, second.out_features) == ("GELU", False, 8)
    assert isinstance(last, NormalizeModule)
    assert width_behind(found) == 8 and found.joins_dense


def _write(folder: Path, modules: Sequence[tuple[str, dict[str, Any] | None]]) -> None:
    entries = []
    for i, (kind, config) in enumerate(modules):
        path = f"{i}_{kind}" if i else ""
        entries.append({"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"})
        if config is not None:
            (folder / path).mkdir(exist_ok=True)
            (folder / path / "config.json").write_text(json.dumps(config))
    (folder / "modules.json").write_text(json.dumps(entries))


OLD = {"word_embedding_dimension": WIDTH, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}


@pytest.mark.parametrize(
    ("flags", "modes"),
    [
        ({}, (PoolingMode.MEAN,)),
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, (PoolingMode.LAST,)),
        ({"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True},
         (PoolingMode.CLS, PoolingMode.MAX, PoolingMode.MEAN)),
        ({"pooling_mode_mean_tokens": False}, (PoolingMode.MEAN,)),
        ({"pooling_mode": ["lasttoken", "cls"]}, (PoolingMode.LAST, PoolingMode.CLS)),
    ],
)  # fmt: skip
def test_reads_booleans_and_names(flags: dict[str, Any], modes: tuple[PoolingMode, ...], tmp_path: Path) -> None:
    _write(tmp_path, [("Transformer", None), ("Pooling", OLD | flags)])
    found = read_modules(tmp_path)
    assert found is not None
    assert found.pooling is not None
    assert found.pooling.modes == modes


POOLING = ("Pooling", OLD)
TRANSFORMER = ("Transformer", None)
DENSE = {"in_features": WIDTH, "out_features": 4, "activation_function": "torch.nn.modules.activation.Tanh"}


@pytest.mark.parametrize(
    ("modules", "words"),
    [
        ([], "lists no modules"),
        ([TRANSFORMER, POOLING, ("WordWeights", {})], "WordWeights is not supported"),
        ([POOLING, TRANSFORMER], "first module"),
        ([TRANSFORMER, POOLING, POOLING], "second Pooling"),
        ([TRANSFORMER, ("Dense", DENSE), POOLING], "Dense before the Pooling"),
        ([TRANSFORMER, POOLING, ("Dense", DENSE)], "no weights"),
        ([TRANSFORMER, POOLING, ("Dense", DENSE | {"in_features": "x"})], "in_features"),
        ([TRANSFORMER, POOLING, ("Dense", DENSE | {"activation_function": "mine.Act"})], "'mine.Act'"),
        ([TRANSFORMER, POOLING, ("Dense", DENSE | {"module_input_name": "token_embeddings"})], "module_input_name"),
        ([TRANSFORMER, POOLING, ("Normalize", {"module_input_name": "token_embeddings"})], "module_input_name"),
        ([TRANSFORMER, ("Pooling", OLD | {"pooling_mode": "median"})], "'median'"),
        ([TRANSFORMER, ("Pooling", OLD | {"pooling_mode": []})], "empty list"),
        ([TRANSFORMER, ("Pooling", OLD | {"pooling_mode_new": True})], "pooling_mode_new"),
        ([TRANSFORMER, ("Pooling", {"pooling_mode": "mean"})], "embedding_dimension"),
        ([TRANSFORMER, POOLING, ("LogitScore", {"true_token_id": 3})], "not both"),
        ([TRANSFORMER, ("LogitScore", {})], "true_token_id"),
    ],
)
def test_refuses_by_name(modules: Sequence[Any], words: str, tmp_path: Path) -> None:
    _write(tmp_path, modules)
    with pytest.raises(ConfigError, match=words) as error:
        read_modules(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_refuses_code_of_others(tmp_path: Path) -> None:
    """sentence-transformers imports it with trust_remote_code alone."""
    entries = [{"type": "custom_st.Transformer"}, {"type": "sentence_transformers.models.Normalize"}]
    (tmp_path / "modules.json").write_text(json.dumps(entries))
    with pytest.raises(ConfigError, match=r"module custom_st\.Transformer is code of another package"):
        read_modules(tmp_path)


def test_the_order_is_that_of_the_file(tmp_path: Path) -> None:
    """sentence-transformers reads no `idx`, and keeps one module of a name: two are refused."""
    theirs = save_sentence_folder(tmp_path, Pooling(WIDTH), Normalize(), Dense(WIDTH, 8))
    path = tmp_path / "modules.json"
    entries = json.loads(path.read_text())
    for numbers in ([3, 0, 2, 1], [None] * 4, [None, 5, 2, None]):
        named = [entry | {"idx": number} for entry, number in zip(entries, numbers, strict=True)]
        path.write_text(json.dumps([{k: v for k, v in entry.items() if v is not None} for entry in named]))
        loaded = SentenceTransformer(str(tmp_path), device="cpu")
        assert [type(module) for module in loaded] == [type(module) for module in theirs]
        found = read_modules(tmp_path)
        assert found is not None
        assert [type(module) for module in found.behind] == [NormalizeModule, DenseModule]
    path.write_text(json.dumps([entry | {"name": "1"} if i > 1 else entry for i, entry in enumerate(entries)]))
    with pytest.raises(ConfigError, match="two modules with the name '1'"):
        read_modules(tmp_path)


def test_dense_that_does_not_fit(tmp_path: Path) -> None:
    _write(tmp_path, [TRANSFORMER, POOLING, ("Dense", DENSE | {"in_features": 7})])
    (tmp_path / "2_Dense" / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match="in_features 7 does not fit the 32"):
        read_modules(tmp_path)


def test_paths_stay_inside(tmp_path: Path) -> None:
    entry = {"idx": 0, "path": "../other", "type": "sentence_transformers.models.Transformer"}
    (tmp_path / "modules.json").write_text(json.dumps([entry]))
    with pytest.raises(ConfigError, match="outside"):
        read_modules(tmp_path)


def test_no_modules(tmp_path: Path) -> None:
    assert read_modules(tmp_path) is None


def test_reads_a_logit_score(tmp_path: Path) -> None:
    _write(tmp_path, [TRANSFORMER, ("LogitScore", {"true_token_id": 3, "false_token_id": 5})])
    found = read_modules(tmp_path)
    assert found is not None
    assert found.logit_score is not None
    assert (found.logit_score.true_token_id, found.logit_score.false_token_id) == (3, 5)

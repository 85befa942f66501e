"""Parallel readers give the same weights and errors as one reader."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import BY_NAME

from blockyard.services.gpu_worker.loading import checkpoint, parallel_load
from blockyard.services.gpu_worker.loading.hf_config import read_config
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.registry import find_family
from blockyard.shared.errors import LoadError


def empty_table(folder: Path, dtype: torch.dtype = torch.float32) -> WeightTable:
    config = read_config(folder)
    return find_family(config)(config, WeightTable(dtype, torch.device("cpu"))).table


def load(folder: Path, dtype: torch.dtype = torch.float32, chunk_bytes: int = 1000) -> WeightTable:
    table = empty_table(folder, dtype)
    fractions: list[float] = []
    parallel_load.load(checkpoint.find_files(folder, "auto", []), table, fractions.append, chunk_bytes)
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    table.check_complete()
    return table


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_weights_as_one_after_another(tmp_path: Path, dtype: torch.dtype) -> None:
    BY_NAME["llama"].save(tmp_path)  # several shards, and rows of q and k that are brought into pairs
    expected = empty_table(tmp_path, dtype)
    checkpoint.load(expected, tmp_path, "auto", [], 0, lambda _: None)
    table = load(tmp_path, dtype)
    for name, place in expected.places.items():
        assert torch.equal(table.places[name].target, place.target), name


def test_half_of_a_file(tmp_path: Path) -> None:
    BY_NAME["llama"].save(tmp_path)
    file = next(tmp_path.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(LoadError, match="not a usable safetensors file"):
        load(tmp_path)


def test_a_wrong_shape_and_an_odd_type_are_named(tmp_path: Path) -> None:
    BY_NAME["llama"].save(tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_bytes())["weight_map"]
    file = tmp_path / index["model.norm.weight"]
    save_file({"model.norm.weight": torch.ones(63)}, file)
    with pytest.raises(LoadError, match=r"model.norm.weight: the checkpoint has \[63\], config.json means \[64\]"):
        load(tmp_path)
    save_file({"model.norm.weight": torch.ones(64, dtype=torch.int16)}, file)
    with pytest.raises(LoadError, match=r"model\.norm\.weight: the checkpoint has int16, expected bfloat16, float16"):
        load(tmp_path)
    save_file({"model.norm.weight": torch.ones(64, dtype=torch.complex64)}, file)
    with pytest.raises(LoadError, match=r"model\.norm\.weight is of type C64, known are BF16, F16"):
        load(tmp_path)


def test_all_types_arrive_as_they_are(tmp_path: Path) -> None:
    """Random bytes of each type that a header may name, read by our reader of headers and by safetensors' own."""
    made = {}
    for word, dtype in parallel_load.DTYPES.items():
        flat = torch.randint(0, 2 if dtype == torch.bool else 256, (24,), dtype=torch.uint8)
        made[word] = flat.view(dtype)
    save_file(made, tmp_path / "model.safetensors")
    table = WeightTable(torch.float32, torch.device("cpu"))
    for name, value in made.items():
        table.place(name, torch.empty_like(value), tuple(value.shape), stored=frozenset({value.dtype}))
    parallel_load.load([tmp_path / "model.safetensors"], table, lambda done: None, 7)
    table.check_complete()
    with parallel_load.open_safetensors(tmp_path / "model.safetensors") as opened:
        for name, value in made.items():
            assert torch.equal(table.places[name].target.view(torch.uint8), value.view(torch.uint8)), name
            assert parallel_load.DTYPES[opened.get_slice(name).get_dtype()] == value.dtype


def test_layers_are_read_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    BY_NAME["llama"].save(tmp_path)
    monkeypatch.setattr(parallel_load, "READERS", 1)
    table, order = empty_table(tmp_path), list[str]()
    put = table.put
    monkeypatch.setattr(table, "put", lambda name, value: (order.append(name), put(name, value)))
    parallel_load.load(checkpoint.find_files(tmp_path, "auto", []), table, lambda done: None)
    layers = [int(name.split(".")[2]) for name in order if ".layers." in name]
    assert layers == sorted(layers)
    assert len(order) == len(table.places)


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    save_file({"a": torch.ones(4000)}, tmp_path / "a.safetensors")
    table = WeightTable(torch.float32, torch.device("cpu"))
    table.vector("a", 4000)
    with (tmp_path / "a.safetensors").open("r+b") as file:
        stored = next(parallel_load.list_tensors(tmp_path / "a.safetensors", file.fileno()))
        file.truncate(8000)
        with pytest.raises(LoadError, match="ends within a"):
            parallel_load.Reader(table, 1000).load(stored, table)

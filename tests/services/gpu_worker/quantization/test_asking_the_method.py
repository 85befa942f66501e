"""A format that no other part of the worker knows: what uses a weight asks its method, and reads no tensor of it."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from plan_driver import Driver
from safetensors.torch import load_file, save_file
from tiny_models import BY_NAME, settings, start
from torch import Tensor

from blockyard.services.gpu_worker import engine
from blockyard.services.gpu_worker.layers import linear as linear_layers
from blockyard.services.gpu_worker.layers.cpu_offload import share_of_layers
from blockyard.services.gpu_worker.layers.linear import LinearLayers, make_spec
from blockyard.services.gpu_worker.loading.linear_spec import ExpertSpec, LinearSpec, Shard, Split, part
from blockyard.services.gpu_worker.loading.weights import HostShare, WeightTable
from blockyard.services.gpu_worker.memory import GIB
from blockyard.services.gpu_worker.models.interface import tensors_of
from blockyard.services.gpu_worker.models.registry import find_family
from blockyard.services.gpu_worker.quantization.dense import UnquantizedFormat, place_rows, place_weights
from blockyard.services.gpu_worker.quantization.method import ExpertMethod, Format, Fusion, LinearMethod
from blockyard.services.gpu_worker.startup.cpu import CpuBackend
from blockyard.shared.messages import Sampling

NAME = "rows8"
CONFIG = {"quantization_config": {"quant_method": NAME}}
CPU = torch.device("cpu")
INT8, FLOAT32 = frozenset({torch.int8}), frozenset({torch.float32})


class Rows8:
    """8-bit integers and a scale for each row. Implements `LinearMethod`."""

    form = None
    fusions = frozenset[Fusion]()

    def __init__(self, codes: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        self._tensors, self._bias = {"codes": codes, "scales": scales}, bias
        self.shape, self.size_bytes = (codes.shape[1], codes.shape[0]), codes.nbytes + scales.nbytes

    def prepare(self) -> None:
        pass

    def apply(self, x: Tensor) -> Tensor:
        return F.linear(x, self._tensors["codes"] * self._tensors["scales"][:, None], self._bias)

    def tensors(self) -> dict[str, Tensor]:
        return dict(self._tensors)

    def replace(self, name: str, tensor: Tensor) -> None:
        self._tensors[name] = tensor


def fill_codes(codes: Tensor, generator: torch.Generator) -> None:
    codes.random_(-127, 128, generator=generator)


def fill_scales(scales: Tensor, _: torch.Generator) -> None:
    scales.fill_(0.02 / 73.6)


class Rows8Format:
    """Implements `Format`: linear layers alone are quantized."""

    def __init__(self) -> None:
        self._others = UnquantizedFormat()

    def linear(self, table: WeightTable, spec: LinearSpec) -> LinearMethod:
        if "lm_head" in spec.parts[0].name:
            return self._others.linear(table, spec)
        rows, columns = spec.num_outputs(table.shard), spec.num_inputs(table.shard)
        kinds = ((rows, columns), torch.int8), ((rows,), torch.float32)
        codes, scales = table.layer_memory(spec.parts[0].name, *kinds)
        place_weights(table, spec, codes, stored=INT8, fill=fill_codes)
        place_rows(table, spec, scales, ".weight_scale", is_added=False, stored=FLOAT32, fill=fill_scales)
        bias = table.empty(rows) if spec.bias else None
        if bias is not None:
            place_rows(table, spec, bias)
        return Rows8(codes, scales, bias)

    def experts(self, table: WeightTable, spec: ExpertSpec) -> ExpertMethod:
        return self._others.experts(table, spec)

    def plain(self, table: WeightTable, spec: LinearSpec, dtype: torch.dtype) -> Tensor:
        return self._others.plain(table, spec, dtype)


@pytest.fixture(autouse=True)
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_format(config: dict[str, Any], table: WeightTable) -> Format:
        return Rows8Format() if config.get("quantization_config") else UnquantizedFormat()

    monkeypatch.setattr(linear_layers, "find_format", find_format)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint in the format, and the same one with the numbers that it stands for."""
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    BY_NAME["qwen2"].save(plain)
    config, files = json.loads((plain / "config.json").read_text()), list(plain.glob("*.safetensors"))
    tensors = {key: value for file in files for key, value in load_file(file).items()}
    for file in [*files, *plain.glob("*.index.json")]:
        file.unlink()
    stored = dict(tensors)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        scales = tensors[name].abs().amax(1) / 127
        codes = (tensors[name] / scales[:, None]).round().to(torch.int8)
        stored |= {name: codes, f"{name}_scale": scales}
        tensors[name] = codes * scales[:, None]
    packed.mkdir()
    save_file(tensors, plain / "model.safetensors")
    save_file(stored, packed / "model.safetensors")
    (packed / "config.json").write_text(json.dumps(config | CONFIG))
    return plain, packed


def output(folder: Path, **fields: object) -> list[int]:
    driver = Driver(start(folder, max_model_len=64, **fields))
    stream = driver.add([5, 9, 3], Sampling(max_tokens=12, temperature=0.0, ignore_eos=True))
    driver.run()
    return stream.output


@pytest.mark.parametrize("fields", [{}, {"batch_invariant": True}])
def test_the_same_tokens_as_of_what_is_stored(folders: tuple[Path, Path], fields: dict[str, object]) -> None:
    plain, packed = folders
    assert output(packed, **fields) == output(plain, **fields)


@pytest.mark.parametrize("share", [0.4, 1.0])
def test_all_tensors_of_a_matrix_are_in_host_memory_together(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    want = output(folders[1])
    monkeypatch.setattr(CpuBackend, "host_share", lambda *given: HostShare(share, share))
    assert output(folders[1]) == want
    table = start(folders[1], max_model_len=64).model.table
    kinds = [one.dtype for one in table.matrices_on_host]
    assert kinds == [torch.int8, torch.float32] * (len(kinds) // 2)
    assert 0.2 * share < sum(one.nbytes for one in table.matrices_on_host) / table.matrix_bytes <= share


def test_bytes_are_those_of_the_format(folders: tuple[Path, Path]) -> None:
    plain, packed = (json.loads((folder / "config.json").read_text()) for folder in folders)
    tables = [WeightTable(torch.float32, torch.device("meta")) for _ in range(2)]
    for config, table in zip((plain, packed), tables, strict=True):
        find_family(config)(config, table)
    rows = sum(len(t) for name, t in load_file(folders[1] / "model.safetensors").items() if name.endswith("_scale"))
    assert tables[1].matrix_bytes == tables[0].matrix_bytes // 4 + 4 * rows
    share = share_of_layers(partial(find_family(packed), packed), torch.float32, tables[1].matrix_bytes / GIB, GIB)
    assert share.matrices == pytest.approx(1.0, abs=1e-4)


def test_dummy_weights_stand_for_numbers_as_those_of_other_formats(folders: tuple[Path, Path]) -> None:
    config = settings(folders[1], load_format="dummy")
    model = engine.start(config, lambda phase, progress, notes: None).model
    for linear in model.linears()[:-1]:
        codes, scales = (linear.method.tensors()[name] for name in ("codes", "scales"))
        assert 0.017 < float((codes * scales[:, None]).std()) < 0.023


def test_sleep_moves_all_of_its_tensors(folders: tuple[Path, Path]) -> None:
    model = start(folders[1], max_model_len=64).model
    kept = {id(tensor) for tensor in tensors_of(model)}
    assert all(id(one) in kept for linear in model.linears()[:-1] for one in linear.method.tensors().values())


@pytest.mark.parametrize("split", Split)
def test_scales_of_rows_are_those_of_the_ranks_rows(split: Split) -> None:
    codes, scales = torch.randint(-127, 128, (8, 6), dtype=torch.int8), torch.rand(8)
    x, got = torch.randn(3, 6), []
    for rank in range(2):
        table = WeightTable(torch.float32, CPU, shard=Shard(rank, 2))
        linear = LinearLayers(table, CONFIG).make([part("a", 8)], 6, split=split, bias=True)
        for name, value in {"weight": codes, "weight_scale": scales, "bias": torch.arange(8.0)}.items():
            table.put(f"a.{name}", value)
        inputs = linear.spec.inputs.share(table.shard) if split is Split.INPUTS else range(6)
        got.append(linear(x[:, list(inputs)]))
    want = F.linear(x, codes * scales[:, None], torch.arange(8.0))
    whole = {Split.OUTPUTS: torch.cat(got, 1), Split.INPUTS: got[0] + got[1], Split.NONE: got[1]}[split]
    torch.testing.assert_close(whole, want)


def test_a_method_that_fuses_nothing_gets_the_plain_form() -> None:
    linear = LinearLayers(WeightTable(torch.float32, CPU), CONFIG).make([part("a", 8)], 6, fusion=Fusion.NORM)
    assert linear.fusion is Fusion.NONE
    assert make_spec([part("a", 8)], 6) == linear.spec

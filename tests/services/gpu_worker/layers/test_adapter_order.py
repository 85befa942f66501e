"""When products of adapters are launched, and which of their inputs they may read before a wait."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from blockyard.kernels.lora.adapter_table import AdapterTable, AdapterTiles
from blockyard.kernels.lora.adapter_tokens import adapt_embeddings_reference, replace_logits_reference
from blockyard.kernels.lora.add_to_heads import add_to_heads_reference
from blockyard.services.gpu_worker.layers.adapter_rows import AdapterRows
from blockyard.services.gpu_worker.layers.linear import OrderedProduct, dense_linear
from blockyard.services.gpu_worker.lora.device.device_products import AdapterKernels, DeviceAdaptedRows
from blockyard.services.gpu_worker.quantization.method import Fusion


@pytest.mark.parametrize("is_fused", [False, True])
def test_the_first_product_of_adapters_is_launched_before_the_layers_own(*, is_fused: bool) -> None:
    seen, rows, ints = list[str](), AdapterRows(), torch.zeros(1, 1, dtype=torch.int32)

    def start(x: Tensor, *arguments: object, **others: object) -> Callable[[Tensor], None]:
        seen.append("start")
        return lambda out: seen.append("add")

    def product(x: Tensor, **others: object) -> Tensor:
        seen.append("product")
        return x

    table = AdapterTable(torch.zeros(1), torch.zeros(1, 1, 3).long(), ints, ints[0], ints[0], 3, 1)
    kernels = AdapterKernels(start, add_to_heads_reference, adapt_embeddings_reference, replace_logits_reference)
    linear = dense_linear(torch.eye(3), fusion=Fusion.NORM)
    linear.use({2: product}, fused={2: product})
    linear.adapt(DeviceAdaptedRows(rows, table, kernels))
    rows.begin(torch.zeros(2, dtype=torch.int32))
    multiply = linear.fused(2) if is_fused else linear
    assert multiply is not None
    multiply(torch.ones(2, 3))
    assert seen == ["start", "product", "add"]


def test_adapters_know_of_an_ordered_product() -> None:
    """Both of theirs may then be launched behind it."""
    seen, rows, linear = list[object](), AdapterRows(), dense_linear(torch.eye(3))

    def start(x: Tensor, *arguments: object, is_ordered: bool, **others: object) -> Callable[[Tensor], None]:
        return lambda out: seen.append(is_ordered)

    ints = torch.zeros(1, 1, dtype=torch.int32)
    table = AdapterTable(torch.zeros(1), torch.zeros(1, 1, 3).long(), ints, ints[0], ints[0], 3, 1)
    kernels = AdapterKernels(start, add_to_heads_reference, adapt_embeddings_reference, replace_logits_reference)
    linear.adapt(DeviceAdaptedRows(rows, table, kernels))
    rows.begin(torch.zeros(2, dtype=torch.int32))
    for product in (OrderedProduct(torch.clone), torch.clone):
        linear.use({2: product})
        linear(torch.ones(2, 3))
    assert seen == [True, False]


def test_tiles_of_some_rows_are_not_read_early() -> None:
    """No other kernel runs between the one that makes them and the products of these rows."""
    rows = AdapterRows()
    rows.tile_rows = lambda places: AdapterTiles(places, places, 1)
    rows.begin(torch.zeros(4, dtype=torch.int32))
    assert rows.tiles is not None and rows.tiles.is_early
    with rows.only(torch.tensor([1, 2])):
        assert len(rows.places) == 2 and not rows.tiles.is_early
    assert len(rows.places) == 4 and rows.tiles.is_early

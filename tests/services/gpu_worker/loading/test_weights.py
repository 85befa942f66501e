"""The names that checkpoints use for one weight, and the parts of them that are not used."""

import pytest
import torch

from blockyard.services.gpu_worker.loading.checkpoint import fill_dummy
from blockyard.services.gpu_worker.loading.linear_spec import LinearSpec, MatrixPart, Rows, part
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.quantization.dense import UnquantizedFormat, UnquantizedLinear
from blockyard.shared.errors import LoadError


def make_table() -> WeightTable:
    return WeightTable(torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("model.norm.weight", "norm.weight"),
        ("model.norm.weight", "language_model.model.norm.weight"),
        ("model.norm.weight", "model.language_model.norm.weight"),
        ("transformer.ln_f.weight", "ln_f.weight"),
        ("gpt_neox.final_layer_norm.weight", "final_layer_norm.weight"),
        ("lm_head.weight", "language_model.lm_head.weight"),
        ("lm_head.weight", "embed_out.weight"),  # an alias
    ],
)
def test_names_of_one_weight(place: str, name: str) -> None:
    table = make_table()
    target = table.vector(place, 3)
    table.alias("embed_out.weight", "lm_head.weight")
    assert table.wants(name)
    table.put(name, torch.tensor([1.0, 2.0, 3.0]))
    table.check_complete()
    assert target.tolist() == [1.0, 2.0, 3.0]


def test_parts_that_are_not_used_are_named() -> None:
    table = make_table()
    table.vector("model.norm.weight", 3)
    table.leave_out("visual.", "mtp.")
    assert table.describe_unused() == []
    for name in ("visual.a", "model.visual.b", "visual.a"):
        assert not table.wants(name)
    assert table.describe_unused() == ["not used: 2 tensors of visual"]
    with pytest.raises(LoadError, match=r"a weight that the model does not: audio\.a"):
        table.wants("audio.a")


def test_weights_that_are_ignored_are_named() -> None:
    table = make_table()
    table.leave_out("model.layers.3.")
    for name in ("lm_head.weight", "model.layers.0.self_attn.k_scale", "model.layers.1.self_attn.k_scale"):
        table.ignore(name)
        assert not table.wants(name)
    for name in ("model.layers.3.mlp.a", "model.layers.0.rotary_emb.inv_freq", "model.layers.1.rotary_emb.inv_freq"):
        assert not table.wants(name)
    assert table.describe_unused() == [
        "not used: 1 tensor of model.layers.3, 2 tensors of inv_freq, 1 tensor of lm_head.weight, "
        "2 tensors of self_attn.k_scale"
    ]


def make_linear(table: WeightTable, parts: list[MatrixPart], transposed: bool) -> UnquantizedLinear:
    spec = LinearSpec(parts=tuple(parts), inputs=Rows(3, 3), bias=True, transposed=transposed)
    made = UnquantizedFormat().linear(table, spec)
    assert isinstance(made, UnquantizedLinear)
    return made


@pytest.mark.parametrize("transposed", [True, False])
def test_matrices_stored_as_in_by_out(transposed: bool) -> None:
    table, stored = make_table(), torch.arange(6.0).view(2, 3)
    made = make_linear(table, [part("a", 2, arrange=lambda rows: rows.flip(0))], transposed)
    table.put("a.weight", stored.t() if transposed else stored)
    table.put("a.bias", torch.tensor([5.0, 6.0]))
    assert made.weight.tolist() == [[3.0, 4.0, 5.0], [0.0, 1.0, 2.0]]
    assert made.bias is not None
    assert made.bias.tolist() == [6.0, 5.0]


@pytest.mark.parametrize("transposed", [False, True])
def test_rows_that_a_checkpoint_has_once(transposed: bool) -> None:
    table, stored = make_table(), torch.arange(6.0).view(2, 3)
    twice = MatrixPart(
        name="a", rows=(Rows(2, 2),) * 2, arrange=lambda rows: torch.cat((rows.flip(0), rows)), stored_rows=2
    )
    made = make_linear(table, [twice, part("b", 1)], transposed)
    table.put("a.weight", stored.t() if transposed else stored)
    table.put("a.bias", torch.tensor([5.0, 6.0]))
    assert made.weight[:4].tolist() == [[3.0, 4.0, 5.0], [0.0, 1.0, 2.0], [0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert made.bias is not None
    assert made.bias[:4].tolist() == [6.0, 5.0, 5.0, 6.0]
    assert made.weight.shape == (5, 3)


def test_dummy_norms_and_factors_are_ones() -> None:
    table = make_table()
    norm, bias, matrix = (
        table.vector("h.0.ln_1.weight", 4),
        table.vector("h.0.ln_1.bias", 4),
        table.matrix("w.weight", 4, 4),
    )
    factors = [table.vector(f"h.0.{name}", 4) for name in ("layer_scalar", "router.scale")]
    fill_dummy(table, 0, lambda done: None)
    assert [one.tolist() for one in (norm, *factors)] == [[1.0] * 4] * 3
    assert float(bias.abs().max()) < 0.2
    assert float(matrix.abs().max()) < 0.2

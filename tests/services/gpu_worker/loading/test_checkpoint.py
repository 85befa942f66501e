"""Reading weights: every file format gives the same values, and every error is one line."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import BY_NAME, settings, start

from blockyard.services.gpu_worker import engine
from blockyard.services.gpu_worker.loading import checkpoint
from blockyard.services.gpu_worker.loading.hf_config import read_config
from blockyard.services.gpu_worker.loading.linear_spec import Cut
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.registry import find_family
from blockyard.shared.errors import LoadError


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    BY_NAME["llama"].save(folder)
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


@pytest.fixture
def whole(sharded: Path, tmp_path: Path) -> Path:
    """The same weights in one file."""
    (tmp_path / "config.json").write_bytes((sharded / "config.json").read_bytes())
    save_file(weights(sharded), tmp_path / "model.safetensors")
    return tmp_path


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def load(folder: Path, load_format: str = "auto", ignore: tuple[str, ...] = (), seed: int = 0) -> WeightTable:
    config = read_config(folder)
    model = find_family(config)(config, WeightTable(torch.float32, torch.device("cpu")))
    fractions: list[float] = []
    checkpoint.load(model.table, folder, load_format, list(ignore), seed, fractions.append)
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    return model.table


def same(a: WeightTable, b: WeightTable) -> bool:
    return all(torch.equal(a.places[n].target, b.places[n].target) for n in a.places)


def test_all_file_kinds_give_the_same_weights(sharded: Path, whole: Path) -> None:
    expected = load(sharded)
    assert same(load(whole), expected)
    torch.save(weights(whole), whole / "pytorch_model.bin")
    assert same(load(whole, "pt"), expected)
    assert same(load(whole, "auto", ignore=("*.safetensors",)), expected)
    half = {n: v.half() for n, v in weights(whole).items()}
    (whole / "model.safetensors").unlink()
    torch.save(half, whole / "pytorch_model.bin")
    for name, place in load(whole).places.items():
        torch.testing.assert_close(place.target, expected.places[name].target, atol=2e-3, rtol=1e-3)


def test_sharded_torch_files(whole: Path) -> None:
    expected = load(whole)
    parts = list(weights(whole).items())
    names = {}
    for i in (0, 1):
        file = f"pytorch_model-0000{i + 1}-of-00002.bin"
        torch.save(dict(parts[i::2]), whole / file)
        names |= dict.fromkeys(dict(parts[i::2]), file)
    (whole / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))
    (whole / "model.safetensors").unlink()
    assert same(load(whole), expected)


def test_q_and_k_rows_are_brought_into_pairs(whole: Path) -> None:
    theirs = weights(whole)["model.layers.0.self_attn.k_proj.weight"]
    ours = load(whole).places["model.layers.0.self_attn.k_proj.weight"].target
    dim = 16
    assert torch.equal(ours[:4], theirs[[0, dim // 2, 1, dim // 2 + 1]])


def test_a_bare_decoders_names(whole: Path) -> None:
    expected = load(whole)
    bare = {n.removeprefix("model."): v for n, v in weights(whole).items()}
    save_file(bare, whole / "model.safetensors")
    assert same(load(whole), expected)


def test_dummy_weights_are_seeded_and_need_no_files(sharded: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((sharded / "config.json").read_bytes())
    first = load(tmp_path, "dummy", seed=1)
    assert same(first, load(tmp_path, "dummy", seed=1))
    assert not same(first, load(tmp_path, "dummy", seed=2))
    assert first.places.keys() == load(sharded).places.keys()
    assert float(first.places["model.norm.weight"].target.mean()) == 1.0
    assert 0 < float(first.places["lm_head.weight"].target.abs().mean()) < 0.05


def test_dummy_weights_of_a_name_do_not_depend_on_the_others() -> None:
    """Pipeline stages have parts of one model."""
    device = torch.device("cpu")
    tables = WeightTable(torch.float32, device), WeightTable(torch.float32, device)
    made = [table.matrix(name, 3, 4) for table, names in zip(tables, ("ab", "b"), strict=True) for name in names]
    for table in tables:
        checkpoint.fill_dummy(table, 5, lambda done: None)
    assert torch.equal(made[1], made[2]) and not torch.equal(made[0], made[1])


def test_dummy_weights_of_a_share_need_no_compiler_of_torch() -> None:
    """It is imported by operations on the meta device, and takes a second or more."""
    device = torch.device("cpu")

    def arrange(rows: torch.Tensor) -> torch.Tensor:
        assert not rows.is_meta
        return torch.cat((rows, rows.flip(0)))

    whole, share = (WeightTable(torch.float32, device) for _ in range(2))
    target, own = torch.zeros(8, 3), torch.zeros(2, 3)
    whole.place("a", target, (4, 3), arrange)
    share.place("a", own, (4, 3), arrange, cut=Cut(-2, (range(1, 2), range(6, 7))))
    for table in (whole, share):
        checkpoint.fill_dummy(table, 5, lambda done: None)
    assert torch.equal(own, target[[1, 6]]) and bool(own.all())


def change(folder: Path, **named: torch.Tensor | None) -> None:
    held = {n: v.clone() for n, v in weights(folder).items()}
    for name, value in named.items():
        dotted = name.replace("__", ".")
        held.pop(dotted, None)
        if value is not None:
            held[dotted] = value
    save_file(held, folder / "model.safetensors")


def refusal(folder: Path, load_format: str = "auto") -> str:
    with pytest.raises(LoadError) as error:
        load(folder, load_format)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_missing_and_left_over_weights_are_named(whole: Path) -> None:
    change(whole, model__norm__weight=None)
    assert refusal(whole) == "the checkpoint lacks model.norm.weight"
    change(whole, model__norm__weight=torch.ones(64), extra__weight=torch.ones(2))
    assert "does not: extra.weight" in refusal(whole)
    change(whole, extra__weight=None, model__norm__weight=torch.ones(63))
    assert refusal(whole) == "model.safetensors: model.norm.weight: the checkpoint has [63], config.json means [64]"


def test_unused_weights_are_skipped(sharded: Path, whole: Path) -> None:
    change(whole, **{"model__layers__0__self_attn__rotary_emb__inv_freq": torch.ones(8)})
    assert same(load(whole), load(sharded))


def test_broken_files(sharded: Path, whole: Path) -> None:
    data = (whole / "model.safetensors").read_bytes()
    (whole / "model.safetensors").write_bytes(data[: len(data) // 2])
    assert "not a usable safetensors file" in refusal(whole)
    (whole / "model.safetensors").write_bytes(b"not at all")
    assert "not a usable safetensors file" in refusal(whole)
    (whole / "model.safetensors").unlink()
    assert "has no weights" in refusal(whole)
    assert "--load-format dummy" in refusal(whole)
    (whole / "pytorch_model.bin").write_bytes(b"nonsense")
    assert "not a usable torch file" in refusal(whole)
    torch.save({"a": print}, whole / "pytorch_model.bin")  # a pickle with code
    assert "not a usable torch file" in refusal(whole)
    torch.save([torch.ones(1)], whole / "pytorch_model.bin")
    assert "holds a list" in refusal(whole)
    (whole / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    assert "lacks gone.safetensors" in refusal(whole)
    (whole / "model.safetensors.index.json").write_text("[]")
    assert "not an index" in refusal(whole)
    assert "is not a folder" in refusal_of_folder(whole / "nowhere")


def refusal_of_folder(folder: Path) -> str:
    with pytest.raises(LoadError) as error:
        checkpoint.find_files(folder, "auto", [])
    return str(error.value)


def test_the_report(sharded: Path) -> None:
    seen: list[tuple[str, float, list[str]]] = []
    engine.start(settings(sharded), lambda phase, progress, notes: seen.append((phase, progress, list(notes))))
    phases = list(dict.fromkeys(phase for phase, _, _ in seen))
    assert phases == [
        "reading the configuration",
        "loading weights",
        "preparing weights",
        "planning memory",
        "reserving KV memory",
        "first step",
        "ready",
    ]
    notes = "\n".join(seen[-1][2])
    assert "1 compute thread" in notes
    assert "GB/s" in notes
    assert "400 blocks by --num-gpu-blocks-override" in notes
    assert len(seen) < 200


def test_dummy_generates(sharded: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((sharded / "config.json").read_bytes())
    assert start(tmp_path, load_format="dummy").geometry.max_model_len == 256

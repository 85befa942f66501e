"""The tuner with a fake timer and fake GPU properties; without a GPU, products run in Triton's interpreter."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from blockyard.services.gpu_worker.layers.linear import Linear, dense_linear, make_spec
from blockyard.services.gpu_worker.linear_tuning import products as linear_products
from blockyard.services.gpu_worker.linear_tuning import tuner as linear_tuning
from blockyard.services.gpu_worker.linear_tuning.kernel_configs import CUBLAS, KernelConfig
from blockyard.services.gpu_worker.linear_tuning.tuner import Tuner
from blockyard.services.gpu_worker.loading.linear_spec import part
from blockyard.services.gpu_worker.quantization.dense import Float32Linear
from blockyard.services.gpu_worker.quantization.method import Fusion

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(80, 256), (64, 512)]  # out, in
STREAM_K = KernelConfig("stream_k", 64, 16, 32, 3, 4, 2)


@pytest.fixture
def linears(monkeypatch: pytest.MonkeyPatch) -> list[Linear]:
    torch.zeros(1, device=DEVICE)  # initialises CUDA, which reads the real properties
    properties = SimpleNamespace(multi_processor_count=4, name="none", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(linear_products, "WORKSPACE_ELEMENTS", 1 << 16)
    return [dense_linear(torch.randn(*shape).to(DEVICE, torch.float16), fusion=Fusion.NORM) for shape in SHAPES * 2]


def make_tuner(linears: list[Linear]) -> Tuner:
    return Tuner(linears, device=torch.device(DEVICE), dtype=torch.float16)


def made_up(tuner: Tuner, monkeypatch: pytest.MonkeyPatch) -> list[tuple[KernelConfig, int]]:
    """Fakes the timer and returns the configs that it times.

    stream-K is fastest for the first shape from 2 rows on, skinny otherwise, and no kernel beats cuBLAS at 3 rows.
    """
    timed = []

    def seconds(config: KernelConfig, group: list[Linear], rows: int) -> float:
        timed.append((config, rows))
        quick = config.kernel == ("stream_k" if group[0].shape == (256, 80) and rows > 1 else "skinny")
        return 0.5 if quick and rows != 3 else 1.0

    monkeypatch.setattr(tuner, "compile", lambda sizes: None)
    monkeypatch.setattr(tuner.timer, "seconds", seconds)
    monkeypatch.setattr(tuner.timer, "excerpt_seconds", lambda configs, rows: 1.0)
    monkeypatch.setattr(tuner.timer, "step_seconds", lambda configs, rows: sum(2 - (p != CUBLAS) for p in configs))
    return timed


def test_the_quickest_products_are_used_and_kept(
    linears: list[Linear], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path
    tuner = make_tuner(linears)
    timed = made_up(tuner, monkeypatch)
    done: list[float] = []
    assert tuner.tune([1, 2, 3], done.append, path).startswith(
        "linear layers: 4 of 6 shapes in own kernels, measured 3"
    )
    assert done == [0, 1 - 2 / 3, 1 - 1 / 3, 1]
    assert (CUBLAS, 3) in timed
    assert [sorted(linear._products) for linear in linears] == [[1, 2]] * 4
    assert [linear.fused(1) is not None for linear in linears] == [True] * 4
    assert [linear.fused(2) is not None for linear in linears] == [False, True] * 2, "tiles take nothing in"

    again = make_tuner(linears)
    timed = made_up(again, monkeypatch)
    assert again.tune([1, 2, 3], done.append, path).endswith("4 of 6 shapes in own kernels, as measured before")
    assert not timed
    for linear in linears:
        for rows in (1, 2, 3):
            x = torch.randn(rows, linear.shape[0]).to(DEVICE, torch.float16)
            want = x.double() @ linear.method.weight.double().T
            assert float((linear(x).double() - want).norm() / want.norm()) < 1e-3


def test_another_rank_installs_what_the_leader_has_measured(
    linears: list[Linear], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has fewer layers of one shape, and one of a shape that the leader has not."""
    leader = make_tuner(linears)
    made_up(leader, monkeypatch)
    leader.tune([2, 3], lambda done: None, tmp_path)
    own = [dense_linear(torch.randn(*shape).to(DEVICE, torch.float16)) for shape in (*SHAPES[:1], (96, 256))]
    follower = make_tuner(own)
    follower.begin([2, 3], tmp_path / "other")
    follower.install_those_of(leader.installed())
    assert [linear._products.keys() for linear in own] == [linears[0]._products.keys(), set()]
    assert linears[0]._products, "the leader has measured a quicker one"
    follower.install_those_of(leader.installed([3]))
    assert own[0]._products.keys() == linears[0]._products.keys(), "others stay"


def test_ranks_have_the_same_kernels_of_few_rows_without_a_measurement(
    linears: list[Linear], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_tuning.kernel_configs, "default_config", lambda _, layer, rows, possible: possible[0])
    tuner = make_tuner(linears)
    timed = made_up(tuner, monkeypatch)
    tuner.install_alike([1, 64])
    assert not timed
    for linear in linears:
        assert linear.fused(1) is not None and linear.fused(64) is None
        x = torch.randn(1, linear.shape[0], device=DEVICE).half()
        torch.testing.assert_close(linear(x), linear.method.apply(x), rtol=1e-2, atol=1e-2)


def test_without_fusion_no_product_is_fused(
    linears: list[Linear], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for linear in linears:
        linear.disable_fusion()
    tuner = make_tuner(linears)
    made_up(tuner, monkeypatch)
    tuner.tune([1, 2], lambda done: None, tmp_path)
    assert [sorted(linear._products) for linear in linears] == [[1, 2]] * 4
    assert not any(linear.fused(rows) for linear in linears for rows in (1, 2))


def test_cublas_is_kept_where_the_whole_step_is_not_faster(
    linears: list[Linear], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuner = make_tuner(linears)
    made_up(tuner, monkeypatch)
    monkeypatch.setattr(tuner.timer, "step_seconds", lambda configs, rows: 1.0)
    assert "0 of 2 shapes" in tuner.tune([2], lambda done: None, tmp_path)
    assert not any(linear._products for linear in linears)


def test_the_config_that_makes_the_whole_step_fastest_is_picked(
    linears: list[Linear], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuner = make_tuner(linears)
    made_up(tuner, monkeypatch)

    def beside(configs: list[KernelConfig], rows: int) -> float:
        tiles = [config.kernel == "stream_k" for config in configs]
        return 5.0 - sum(tiles) + 3.0 * all(tiles)  # two in a row are slow

    for name in ("step_seconds", "excerpt_seconds"):
        monkeypatch.setattr(tuner.timer, name, beside)
    assert [config.kernel == "stream_k" for config in tuner.measure(5)] == [True, False]


def test_shapes_outside_the_timed_excerpt_keep_their_own_best_config(
    linears: list[Linear], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_tuning, "EXCERPT", 1)
    tuner = make_tuner(linears)
    made_up(tuner, monkeypatch)
    tried: list[list[KernelConfig]] = []

    def noise(configs: list[KernelConfig], rows: int) -> float:
        tried.append(configs)
        return 1.0 / len(tried)

    monkeypatch.setattr(tuner.timer, "excerpt_seconds", noise)
    tuner.measure(5)
    assert len({configs[0] for configs in tried}) > 1
    assert len({configs[1] for configs in tried[2:]}) == 1


def test_cublas_is_kept_if_measuring_fails(
    linears: list[Linear], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuner = make_tuner(linears)
    made_up(tuner, monkeypatch)

    def fail(*_: object) -> float:
        raise torch.OutOfMemoryError("no memory is left\nat all")

    monkeypatch.setattr(tuner.timer, "seconds", fail)
    assert tuner.tune([1], print, tmp_path).endswith("could not be measured: no memory is left")
    assert not any(linear._products for linear in linears)


def test_a_model_without_weights_that_kernels_read_keeps_the_products_of_its_methods(
    linears: list[Linear], tmp_path: Path
) -> None:
    router = Linear(Float32Linear(torch.randn(8, 80, device=DEVICE)), make_spec([part("gate", 8)], 80), Fusion.NORM)
    assert router.fusion is Fusion.NONE
    tuner = make_tuner([router])
    assert tuner.tune([1, 2], lambda done: None, tmp_path).startswith("linear layers: 0 of 0 shapes in own kernels")
    assert not router._products and tuner.layers == []


def test_frozen_rows_do_not_depend_on_the_others(linears: list[Linear], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        linear_tuning.kernel_configs, "batch_invariant_config", lambda layer, size, processors: STREAM_K
    )
    router, calls = Linear(Float32Linear(torch.randn(8, 80, device=DEVICE)), make_spec([part("gate", 8)], 80)), []
    product = router.method.apply
    monkeypatch.setattr(router.method.__class__, "apply", lambda method, x: calls.append(len(x)) or product(x))
    make_tuner([*linears, router]).make_batch_invariant()
    router(torch.randn(20, 80, device=DEVICE))
    assert calls == [16, 16], "each product has as many rows"
    for linear in linears[:2]:
        x = torch.randn(20, linear.shape[0]).to(DEVICE, torch.float16)
        together = linear(x)
        for rows in (slice(0, 1), slice(3, 20), slice(17, 18)):
            assert torch.equal(linear(x[rows]), together[rows])

"""Every kept form in a model that runs: sleep, reload, host memory, shares of ranks, dummy weights, transformers.

"As on a GPU" means without the CPU's dequantized or repacked weights, so that the tensors of the form itself are moved.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from kept_forms import FORMS, MORE_FORMS, FormSample
from quantized_checkpoint import Checkpoints, check_dummy_weights, check_logits, greedy_tokens
from safetensors.torch import load_file
from tiny_models import start

from blockyard.services.gpu_worker.layers.linear import LinearLayers
from blockyard.services.gpu_worker.layers.moe.expert_weights import separate_experts
from blockyard.services.gpu_worker.loading.linear_spec import Shard, Split, part
from blockyard.services.gpu_worker.loading.sleep import SleepingRunner
from blockyard.services.gpu_worker.loading.weights import HostShare, WeightTable
from blockyard.services.gpu_worker.models.interface import tensors_of
from blockyard.services.gpu_worker.quantization import dense
from blockyard.services.gpu_worker.quantization.kept import form
from blockyard.services.gpu_worker.quantization.kept.form import KeptLinear
from blockyard.services.gpu_worker.runner import Runner
from blockyard.services.gpu_worker.startup.cpu import CpuBackend

CASES = [
    *((name, model) for name in FORMS for model in ("llama", "mixtral")),
    *((name, "llama") for name in MORE_FORMS),
]
DENSE = [(name, model) for name, model in CASES if model == "llama"]


@dataclass(frozen=True, slots=True)
class Case:
    name: str  # of the form
    sample: FormSample
    made: Checkpoints
    tokens: list[int]  # of a worker on the CPU

    def start(self, **fields: object) -> Runner:
        return start(self.made.packed, max_model_len=64, **fields)


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[str, str]], Case]:
    made: dict[tuple[str, str], Case] = {}

    def find(key: tuple[str, str]) -> Case:
        if key not in made:
            sample = (FORMS | MORE_FORMS)[key[0]]
            folders = sample.write(tmp_path_factory.mktemp("form"), key[1])
            runner, name = start(folders.packed, max_model_len=64), key[0].partition(",")[0]
            found = kept(runner)
            assert set(found) == {name}
            assert len(found) > (30 if key[1] == "mixtral" else 5), "each expert's are some"
            made[key] = Case(name, sample, folders, greedy_tokens(runner))
        return made[key]

    return find


@pytest.fixture
def case(make: Callable[[tuple[str, str]], Case], request: pytest.FixtureRequest) -> Case:
    return make(request.param)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(form, "is_dequantized_on", lambda device, kept: False)
    monkeypatch.setattr(dense, "can_pack", lambda weight: False)  # packed matrices are not moved


def kept(runner: Runner) -> list[str]:
    """The forms of matrices, each expert's too."""
    return [one.method.kept_form.name for one in runner.model.linears() if isinstance(one.method, KeptLinear)]


@pytest.mark.parametrize("case", DENSE[: len(FORMS)], indirect=True)
def test_the_fallback_to_transformers(case: Case) -> None:
    runner = check_logits(case.made, case.sample.round_inputs, model_impl="transformers")
    assert set(kept(runner)) == {case.name}


def sleep_and_wake(case: Case, level: int) -> None:
    def begin() -> Runner:
        runners.append(case.start())
        return runners[-1]

    runners: list[Runner] = []
    sleeper = SleepingRunner(begin, lambda: 0)
    assert greedy_tokens(runners[-1]) == case.tokens
    sleeper.sleep(level)
    sleeper.reset(4)
    assert len(runners) == level
    assert greedy_tokens(runners[-1]) == case.tokens


@pytest.mark.parametrize("case", [*((name, "mixtral") for name in FORMS), *DENSE[len(FORMS) :]], indirect=True)
def test_sleep_that_loads_the_files_again(case: Case) -> None:
    sleep_and_wake(case, 2)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("case", CASES, indirect=True)
def test_sleep_that_moves_the_tensors_of_the_form(case: Case) -> None:
    sleep_and_wake(case, 1)
    model = case.start().model
    moved = {id(tensor) for tensor in tensors_of(model)}
    assert all(id(one) in moved for linear in model.linears() for one in linear.method.tensors().values())


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(("case", "share"), [*((one, 1.0) for one in CASES), (CASES[0], 0.4), (CASES[1], 0.4)],
                         indirect=["case"])  # fmt: skip
def test_tensors_of_the_form_are_in_host_memory_together(
    case: Case, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with --cpu-offload-gb."""
    monkeypatch.setattr(CpuBackend, "host_share", lambda *given: HostShare(share, share))
    runner = case.start()
    assert greedy_tokens(runner) == case.tokens
    table, methods = runner.model.table, [linear.method for linear in runner.model.linears()]
    of_form = {one.dtype for method in methods if isinstance(method, KeptLinear) for one in method.tensors().values()}
    on_host = [*table.matrices_on_host, *table.experts_on_host]
    assert {one.dtype for one in on_host} >= {torch.uint8, torch.int8, torch.float8_e4m3fn} & of_form
    held = sum(one.nbytes for one in table.matrices_on_host) / table.matrix_bytes
    assert held == 1.0 if share == 1.0 else 0.1 < held <= share


@pytest.mark.parametrize("case", CASES, indirect=True)
def test_dummy_weights(case: Case) -> None:
    check_dummy_weights(case.made.packed)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("split", Split)
@pytest.mark.parametrize("case", [(name, "llama") for name in FORMS], indirect=True)
def test_shares_of_ranks(case: Case, split: Split) -> None:
    """Of a product of two parts, of which the second one has its rows in another order."""
    packed, plain = (load_file(folder / "model.safetensors") for folder in (case.made.packed, case.made.plain))
    config = json.loads((case.made.packed / "config.json").read_text())
    q, k = (f"model.layers.0.self_attn.{one}_proj" for one in "qk")
    whole = torch.cat((plain[f"{q}.weight"], plain[f"{k}.weight"].flip(0)))
    for rank in range(2):
        table = WeightTable(torch.float32, torch.device("cpu"), shard=Shard(rank, 2))
        parts = [part(q, 64, 2), part(k, 32, 2, lambda rows: rows.flip(0))]
        linear = LinearLayers(table, config).make(parts, 64, split=split)
        for name in sorted((name for name in packed if name.startswith((f"{q}.", f"{k}."))), key=lambda one: one[::-1]):
            table.put(name, packed[name])
        table.check_complete()
        table.finish()
        outputs, inputs = torch.arange(96), torch.arange(64)
        if split is Split.OUTPUTS:
            outputs = torch.cat((torch.arange(32) + 32 * rank, torch.arange(64, 80) + 16 * rank))
        elif split is Split.INPUTS:
            inputs = inputs[32 * rank : 32 * rank + 32]
        assert isinstance(linear.method, KeptLinear)
        torch.testing.assert_close(linear.method.dequantized(), whole[outputs][:, inputs])


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("spreads", [True, False])
@pytest.mark.parametrize("case", [(name, "mixtral") for name in FORMS], indirect=True)
def test_experts_of_ranks(case: Case, spreads: bool) -> None:
    """Some experts whole, or a share of each."""
    packed, plain = (load_file(folder / "model.safetensors") for folder in (case.made.packed, case.made.plain))
    config = json.loads((case.made.packed / "config.json").read_text())
    prefix, num = "model.layers.0.block_sparse_moe.experts", config["num_local_experts"]
    hidden, inner = plain[f"{prefix}.0.w2.weight"].shape
    for rank in range(2):
        table = WeightTable(torch.float32, torch.device("cpu"), shard=Shard(rank, 2))
        table.spreads_experts = spreads
        layers = LinearLayers(table, config)
        weights = separate_experts(layers, prefix, num, hidden, inner, ("w1", "w3", "w2"))
        own = range(num // 2 * rank, num // 2 * (rank + 1)) if spreads else range(num)
        for name in packed:
            if name.startswith(tuple(f"{prefix}.{expert}." for expert in own)):
                table.put(name, packed[name])
        table.check_complete()
        table.finish()
        assert weights.specs is not None
        columns = list(range(inner) if spreads else weights.specs[1].matrix.inputs.share(table.shard))
        assert (weights.places is not None) == spreads
        assert weights.places is None or weights.places.first == own
        for i, expert in enumerate(own):
            w1, w2, w3 = (plain[f"{prefix}.{expert}.w{k}.weight"] for k in (1, 2, 3))
            for method, whole in (
                (weights.gate_up, torch.cat((w1[columns], w3[columns]))),
                (weights.down, w2[:, columns]),
            ):
                linear = method.linear(i)
                assert isinstance(linear, KeptLinear)
                torch.testing.assert_close(linear.dequantized(), whole)

"""A model whose layers differ in what they keep: windows of two heads, one larger head, and latent attention.

No family has all three. Outputs are compared to the last bit, in batch-invariant mode.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from equality import FEW, MAX_MODEL_LEN, Bench, Request, chunked, preempted, prefix_hit, requests, swapped, two_groups
from plan_driver import Driver
from safetensors.torch import save_file
from tiny_models import LLAMA, VOCAB, start

from blockyard.kernels.attention.score_rules import ScoreRules
from blockyard.services.gpu_worker import engine
from blockyard.services.gpu_worker.attention import batch_invariant_cpu
from blockyard.services.gpu_worker.layers.attention import Attention, AttentionShape, AttentionSublayer
from blockyard.services.gpu_worker.layers.decoder_layers import PreNormLayer
from blockyard.services.gpu_worker.layers.embedding import Head, TokenEmbedding
from blockyard.services.gpu_worker.layers.latent.latent_attention import LatentAttention, LatentSizes, latent_shape
from blockyard.services.gpu_worker.layers.linear import LinearLayers
from blockyard.services.gpu_worker.layers.mlp import GatedMLP
from blockyard.services.gpu_worker.layers.norm import make_rms_norm
from blockyard.services.gpu_worker.layers.rope_parameters import RopeParameters
from blockyard.services.gpu_worker.layers.rotary import LayerRotations, RotaryEmbedding
from blockyard.services.gpu_worker.loading.sleep import SleepingRunner
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.decoder import Decoder
from blockyard.services.gpu_worker.models.interface import ModelShape
from blockyard.services.gpu_worker.runner import Runner
from blockyard.shared.messages import Sampling

HIDDEN, ROPE = 64, RopeParameters()
LOCAL = AttentionShape(num_heads=4, kv_heads=2, head_dim=16, rules=ScoreRules(scale=0.25, window=24))
WIDE = AttentionShape(num_heads=4, kv_heads=1, head_dim=32, rules=ScoreRules(scale=0.2))
SIZES = LatentSizes(num_heads=4, plain_dim=12, rotated_dim=8, value_dim=10, latent_dim=24, query_latent_dim=None)
SHAPES = (LOCAL, LOCAL, WIDE, latent_shape(SIZES, ROPE), LOCAL)
BLOCK_BYTES = 4 * 8 * (3 * 2 * 2 * 16 + 2 * 32 + 32)  # of 8 tokens


def build(config: dict[str, Any], table: WeightTable) -> Decoder:
    layers = LinearLayers(table, config)
    embedding = TokenEmbedding(layers, "embed", VOCAB, HIDDEN)

    def make_layer(layer: int) -> PreNormLayer:
        prefix, shape = f"layers.{layer}", SHAPES[layer]
        attention: AttentionSublayer = Attention(layers, prefix, layer, HIDDEN, shape)
        if shape.latent_dim is not None:
            attention = LatentAttention(layers, prefix, layer, HIDDEN, SIZES)
        norms = [make_rms_norm(table, f"{prefix}.norm{i}", HIDDEN, 1e-6) for i in range(2)]
        return PreNormLayer(norms[0], attention, norms[1], GatedMLP(layers, f"{prefix}.mlp", HIDDEN, 96))

    turned = {dim: RotaryEmbedding(ROPE, dim, MAX_MODEL_LEN) for dim in (16, 32, SIZES.rotated_dim)}
    return Decoder(
        table,
        ModelShape(vocab_size=VOCAB, max_positions=MAX_MODEL_LEN, attention=SHAPES),
        embedding=embedding,
        make_layer=make_layer,
        norm=make_rms_norm(table, "norm", HIDDEN, 1e-6),
        head=Head(embedding.make_head(layers, tied=False)),
        rotations=LayerRotations([turned[SIZES.rotated_dim if s.latent_dim else s.head_dim] for s in SHAPES]),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A checkpoint with random weights, while `engine` builds this model."""
    path, table = tmp_path_factory.mktemp("mixed"), WeightTable(torch.float32, torch.device("cpu"))
    (path / "config.json").write_text(json.dumps({**LLAMA, "architectures": ["LlamaForCausalLM"]}))
    build({}, table)
    torch.manual_seed(5)
    weights = {
        name: torch.randn(place.shape) * (0.1 if "norm" in name else 0.2) for name, place in table.places.items()
    }
    save_file({name: w + ("norm" in name) for name, w in weights.items()}, path / "model.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "find_family", lambda *_: build)
        yield path


class MixedBench(Bench):
    def __init__(self, folder: Path) -> None:
        fields = {"max_model_len": MAX_MODEL_LEN, "batch_invariant": True}
        host_gib = 300 * BLOCK_BYTES / 2**30
        self.roomy, self.second = start(folder, **fields), start(folder, **fields)
        self.small = start(folder, num_gpu_blocks_override=FEW, **fields)
        self.swapping = start(folder, num_gpu_blocks_override=FEW, swap_space_gib=host_gib, **fields)


@pytest.fixture(scope="module")
def asked() -> list[Request]:
    return requests(8, max_tokens=20)


def test_every_way_of_scheduling_gives_the_same_tokens(folder: Path, asked: list[Request]) -> None:
    bench = MixedBench(folder)
    assert bench.roomy.pool.arena.bytes.numel() == 400 * BLOCK_BYTES and len(bench.roomy.pool.runs) == 4
    expected = bench.alone(asked)
    assert len({token for tokens in expected.values() for token in tokens}) > 50, "the model is not constant"
    for condition in (chunked, preempted, swapped, prefix_hit, two_groups):
        assert condition(bench, asked).outputs == expected, condition.__name__


def test_each_layer_reads_its_cache(folder: Path, asked: list[Request], monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the test above would show nothing."""
    bench, write = MixedBench(folder), batch_invariant_cpu.write_kv_reference
    want = bench.alone(asked[:1])
    for lost in bench.roomy.pool.rows:
        with torch.inference_mode(), monkeypatch.context() as patch:
            lost.zero_()
            patch.setattr(
                batch_invariant_cpu,
                "write_kv_reference",
                lambda rows, index, kv, lost=lost: None if rows is lost else write(rows, index, kv),
            )
            assert bench.alone(asked[:1]) != want
    assert bench.alone(asked[:1]) == want


@pytest.mark.parametrize("level", [1, 2])
def test_tokens_are_the_same_after_sleep(folder: Path, level: int) -> None:
    def begin() -> Runner:
        runners.append(start(folder, max_model_len=MAX_MODEL_LEN))
        return runners[-1]

    def answer() -> list[int]:
        driver = Driver(runners[-1])
        stream = driver.add(list(range(2, 42)), Sampling(max_tokens=12, temperature=0.0, ignore_eos=True))
        driver.run()
        return stream.output

    runners: list[Runner] = []
    sleeper = SleepingRunner(begin, lambda: 0)
    before = answer()
    sleeper.sleep(level)
    sleeper.reset(4)
    assert answer() == before

"""LoRA adapters of a model's true shape in PEFT's layout, with random numbers, how they are served, and their items.

Without torch, as all that measures from outside: a safetensors file is a header in JSON behind its length, and bytes.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from blockyard.services.bench.suite import measures, shapes
from blockyard.services.bench.suite.item import (
    B8,
    LONG,
    ONE,
    Q30,
    SPREAD,
    TO_9K,
    UNCACHED,
    SuiteItem,
    high,
    low,
    stream,
)
from blockyard.shared.config.text_part import text_part

# by a random byte, the upper half of a bfloat16: numbers of 0.002 to 0.03, of both signs
HIGH = bytes([0x3B, 0xBB, 0x3C, 0xBC] * 64)


def names(num: int) -> list[str]:
    """The adapters' names, which requests give as their model."""
    return [f"adapter-{i}" for i in range(num)]


def serve_flags(model: str, ranks: Sequence[int], folder: Path) -> tuple[str, ...]:
    """Writes an adapter of each rank into new folders in `folder`. Returns the flags of a server with all of them."""
    if not ranks:
        return ()
    written = zip(names(len(ranks)), write_folders(shapes.read(model), ranks, folder, f"{model}-"), strict=True)
    num, most = str(len(ranks)), str(max(ranks))
    modules = (f"{name}={made}" for name, made in written)
    return ("--max-loras", num, "--max-cpu-loras", num, "--max-lora-rank", most, "--lora-modules", *modules)


def write_folders(
    config: dict[str, Any], ranks: Sequence[int], folder: Path, prefix: str = "", *, attention_only: bool = False
) -> list[Path]:
    """Writes an adapter of each rank into a folder of its own in `folder`, all named as `names` behind the prefix.

    config: the model's. Those of a rank share the file of their matrices and have other scales, so that each is read
    and placed by itself.
    """
    found = list[Path]()
    config, suffix = text_part(config), "-attention" if attention_only else ""
    for name, rank in zip(names(len(ranks)), ranks, strict=True):
        made = folder / f"{prefix}{name}"
        made.mkdir(exist_ok=True, parents=True)
        matrices = folder / f"{prefix}rank-{rank}{suffix}.safetensors"
        if not matrices.exists():
            _write_matrices(config, rank, matrices, attention_only=attention_only)
        file = made / "adapter_model.safetensors"
        file.unlink(missing_ok=True)
        file.hardlink_to(matrices)
        # PEFT's all-linear means every module here, too
        peft = {"peft_type": "LORA", "r": rank, "lora_alpha": rank + len(found), "target_modules": "all-linear"}
        (made / "adapter_config.json").write_bytes(msgspec.json.encode(peft))
        found.append(made)
    return found


def _modules(config: dict[str, Any], *, attention_only: bool) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of the adapted modules of a layer, by name: its linear layers, or those of all its experts."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    kv = config["num_key_value_heads"] * head_dim
    found = {
        "self_attn.q_proj": (hidden, heads * head_dim),
        "self_attn.k_proj": (hidden, kv),
        "self_attn.v_proj": (hidden, kv),
        "self_attn.o_proj": (heads * head_dim, hidden),
    }
    if attention_only:
        return found
    num_experts = config.get("num_experts", 0)
    inner = config["moe_intermediate_size" if num_experts else "intermediate_size"]
    for mlp in [f"mlp.experts.{i}" for i in range(num_experts)] or ["mlp"]:
        found[f"{mlp}.gate_proj"] = found[f"{mlp}.up_proj"] = hidden, inner
        found[f"{mlp}.down_proj"] = inner, hidden
    return found


def _write_matrices(config: dict[str, Any], rank: int, file: Path, *, attention_only: bool) -> None:
    """In bfloat16. All layers have the same numbers: those of a mixture's experts take gigabytes."""
    header, end, size = dict[str, dict[str, object]](), 0, 0
    for layer in range(config["num_hidden_layers"]):
        for name, (inputs, outputs) in _modules(config, attention_only=attention_only).items():
            for half, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                begin, end = end, end + 2 * shape[0] * shape[1]
                key = f"base_model.model.model.layers.{layer}.{name}.lora_{half}.weight"
                header[key] = {"dtype": "BF16", "shape": shape, "data_offsets": (begin, end)}
        size = size or end
    encoded, rng, numbers = msgspec.json.encode(header), random.Random(rank), bytearray(size)
    encoded += b" " * (-len(encoded) % 8)
    numbers[0::2] = rng.randbytes(size // 2)
    numbers[1::2] = rng.randbytes(size // 2).translate(HIGH)
    with file.open("wb") as out:
        out.write(len(encoded).to_bytes(8, "little") + encoded)
        for _ in range(config["num_hidden_layers"]):
            out.write(numbers)


def adapted(item: SuiteItem, base: str, adapters: tuple[int, ...]) -> SuiteItem:
    return replace(item, base=base, adapters=adapters)


def _batch(name: str, what: str, target: float, floor: float, ranks: tuple[int, ...], models: Sequence[str]
                   ) -> SuiteItem:  # fmt: skip
    item = low(f"decode-64-8b-{name}", f"8B, 64 at 1,024, {what}, ITL", "ms", B8, ONE, target, floor,
                measures.inter_token(64, 960, 128, models))  # fmt: skip
    return adapted(item, "decode-64", ranks)


RANK_16, TO_128 = (16,) * 64, (8, 16, 16, 32, 32, 64, 64, 128)
NAMES = names(64)
ADAPTER_ITEMS = (
    adapted(stream("8b-adapters-off", B8, "8B with adapters that no row has", 1.01, 1.0, ONE), "itl-8b", RANK_16),
    adapted(
        low("itl-8b-adapter", "8B with an adapter of rank 16, one stream, 128 in / 256 out, ITL", "ms", B8, ONE, 1.14,
             1.08, measures.inter_token(1, 128, 256, NAMES[:1])), "itl-8b", RANK_16),
    _batch("adapters-off", "no row has an adapter", 1.01, 1.0, RANK_16, ()),
    _batch("adapters-1", "one adapter", 1.09, 1.05, RANK_16, NAMES[:1]),
    _batch("adapters-8", "8 adapters", 1.13, 1.07, RANK_16, NAMES[:8]),
    _batch("adapters-half", "8 adapters, half the rows without", 1.12, 1.07, RANK_16,
                   [name for one in NAMES[:8] for name in (one, "")]),
    _batch("adapters-64", "64 adapters", 1.37, 1.24, RANK_16, NAMES),
    _batch("adapters-ranks", "8 adapters of ranks 8 to 128", 1.20, 1.12, TO_128, NAMES[:8]),
    adapted(
        low("ttft-8b-adapter-8192", "8B with an adapter of rank 16, first token of a prompt of 8,192", "ms", B8,
             UNCACHED + LONG, 1.10, 1.0, measures.first_token(8192, NAMES[:1])), "ttft-8b-8192", RANK_16[:1]),
    adapted(
        high("http-8b-adapters-16", "8B over HTTP, 252 streams, 512 in / 256 out, 16 adapters", B8, (*ONE, *SPREAD),
              0.88, 1.0, measures.streamed_rate(252, 512, 256, NAMES[:16])), "http-8b", RANK_16[:16]),
    adapted(
        low("itl-30b-adapter", "Qwen3-30B-A3B with an adapter of attention and all experts, one stream, ITL", "ms", Q30,
             TO_9K, 1.45, 1.21, measures.inter_token(1, 128, 256, NAMES[:1])), "itl-30b", RANK_16[:8]),
    adapted(
        low("decode-64-30b-adapters-8", "Qwen3-30B-A3B, 64 at 1,024, 8 adapters of attention and all experts, ITL",
             "ms", Q30, TO_9K, 1.3, 1.10, measures.inter_token(64, 960, 128, NAMES[:8])), "decode-64-30b", RANK_16[:8]),
)  # fmt: skip

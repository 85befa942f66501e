"""What two workers must agree on, and that the protocol can be imported without torch and zmq."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from blockyard.services.kv_transfer.layout import _WORDS, BlockLayout, as_text, differences

MINE = BlockLayout(
    num_layers=32, kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16", dtype_bytes=2, scope="llama|main|auto"
)


def test_sizes() -> None:
    assert (MINE.piece_bytes, MINE.block_bytes) == (64 << 10, 2 << 20)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, ""),
        ({"num_layers": 28}, "layers 32 here, 28 there"),
        ({"kv_heads": 4}, "KV heads 8 here, 4 there"),
        ({"head_dim": 64}, "head size 128 here, 64 there"),
        ({"block_size": 32}, "block size 16 here, 32 there"),
        ({"dtype": "float16"}, "KV dtype 'bfloat16' here, 'float16' there"),
        ({"dtype_bytes": 1}, "bytes of a KV value 2 here, 1 there"),
        ({"scales": b"\x01\x02"}, "KV scales none here, 0102 there"),
        ({"scope": ""}, "model 'llama|main|auto' here, '' there"),
        ({"checksums": False}, "checksums on here, off there"),
        ({"num_layers": 1, "block_size": 8}, "layers 32 here, 1 there; block size 16 here, 8 there"),
    ],
)
def test_differences_in_words(change: dict[str, object], words: str) -> None:
    other = msgspec.structs.replace(MINE, **change)
    assert differences(MINE, other) == words
    assert (as_text(MINE) == as_text(other)) is (words == "")


def test_the_text_that_workers_compare() -> None:
    assert as_text(MINE) == (
        "layers 32; KV heads 8; head size 128; block size 16; KV dtype 'bfloat16'; bytes of a KV value 2; "
        "KV scales none; model 'llama|main|auto'; checksums on"
    )
    assert {name for name in BlockLayout.__struct_fields__ if name not in _WORDS} == set(), "each field is compared"


def test_every_field_is_compared() -> None:
    for field in BlockLayout.__struct_fields__:
        match getattr(MINE, field):
            case bool(value):
                other: object = not value
            case int(value):
                other = value + 1
            case str(value):
                other = value + "x"
            case bytes(value):
                other = value + b"x"
        assert differences(MINE, msgspec.structs.replace(MINE, **{field: other})), field


def test_the_protocol_needs_neither_torch_nor_zmq() -> None:
    code = "import sys; from blockyard.services.kv_transfer.protocol import incoming, outgoing"
    code += "; print([m for m in ('torch', 'zmq') if m in sys.modules])"
    path = os.pathsep.join([str(Path(__file__).parents[3] / ".src"), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "[]"

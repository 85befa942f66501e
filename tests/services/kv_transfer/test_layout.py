"""What two workers must agree on, and that the protocol can be imported without torch and zmq."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from blockyard.services.kv_transfer.layout import BlockLayout, LayerRun, LayoutPart, as_text, differences

MINE = BlockLayout(
    runs=(LayerRun(32, 8, 128),), block_size=16, dtype="bfloat16", dtype_bytes=2, scope="llama|main|auto"
)


def test_sizes() -> None:
    assert (MINE.sections[0].piece_bytes, MINE.block_bytes) == (64 << 10, 2 << 20)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, ""),
        ({"runs": (LayerRun(28, 8, 128),)}, "layers 32 of 8 KV heads of 128 here, 28 of 8 KV heads of 128 there"),
        ({"runs": (LayerRun(32, 4, 64),)}, "layers 32 of 8 KV heads of 128 here, 32 of 4 KV heads of 64 there"),
        (
            {"runs": (LayerRun(5, 8, 128), LayerRun(1, 1, 576, 1))},
            "layers 32 of 8 KV heads of 128 here, 5 of 8 KV heads of 128 + 1 of 1 KV heads of 576, latent there",
        ),
        ({"block_size": 32}, "block size 16 here, 32 there"),
        ({"dtype": "float16"}, "KV dtype 'bfloat16' here, 'float16' there"),
        ({"dtype_bytes": 1}, "bytes of a KV value 2 here, 1 there"),
        ({"scales": b"\x01\x02"}, "KV scales none here, 0102 there"),
        ({"scope": ""}, "model 'llama|main|auto' here, '' there"),
        ({"checksums": False}, "checksums on here, off there"),
        ({"scope": "", "block_size": 8}, "block size 16 here, 8 there; model 'llama|main|auto' here, '' there"),
    ],
)
def test_differences_in_words(change: dict[str, object], words: str) -> None:
    other = msgspec.structs.replace(MINE, **change)
    assert differences(MINE, other) == words
    assert (as_text(MINE) == as_text(other)) is (words == "")


def test_the_text_that_workers_compare() -> None:
    assert as_text(MINE) == (
        "layers 32 of 8 KV heads of 128; block size 16; KV dtype 'bfloat16'; bytes of a KV value 2; "
        "KV scales none; model 'llama|main|auto'; checksums on"
    )


def test_every_field_but_the_part_is_compared() -> None:
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
            case tuple(value):
                other = value + value
            case None:
                other = LayoutPart(0, 1, ((0, 1),))
        changed = msgspec.structs.replace(MINE, **{field: other})
        same = (differences(MINE, changed) == "", as_text(changed) == as_text(MINE))
        assert same == (field == "part", field == "part"), field


def test_the_protocol_needs_neither_torch_nor_zmq() -> None:
    code = "import sys; from blockyard.services.kv_transfer.protocol import incoming, outgoing"
    code += "; print([m for m in ('torch', 'zmq') if m in sys.modules])"
    path = os.pathsep.join([str(Path(__file__).parents[3] / ".src"), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "[]"

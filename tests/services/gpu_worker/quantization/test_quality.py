"""The demo model with quantized weights needs as many bits per byte as a simulation in float32 says.

One scheme for each kept form, on a part of the held-out text; tests/bench/worker/bench_quality.py has all of both.
"""

from pathlib import Path

import pytest
from quality import SCHEMES, Text, of_worker, simulated

OF_FORMS = {
    "int8": "W8A16",
    "int8, int8 inputs": "Int8W8A8",
    "fp8 rows, fp8 inputs": "Fp8W8A8",
    "4 bits, groups of 128, zeros": "W4A16",
    "nf4": "Table4A16",
}


@pytest.fixture(scope="module")
def text() -> Text:
    return Text(num_files=1, most_tokens=1000)


@pytest.fixture(scope="module")
def plain(text: Text) -> float:
    return simulated(text, None)


@pytest.mark.parametrize("name", OF_FORMS)
def test_the_worker_is_as_good_as_the_simulation(name: str, text: Text, plain: float, tmp_path: Path) -> None:
    scheme = SCHEMES[name]
    want = simulated(text, scheme) / plain - 1
    got, forms = of_worker(text, scheme, tmp_path / "written")
    assert forms == {OF_FORMS[name]}
    assert 0.0001 < abs(want) < 0.05, "the scheme does something"
    assert abs(got / plain - 1 - want) < scheme.most / 100

"""A tiny checkpoint of every format, by the `quant_method` of its file: what the tests of formats have in `SAMPLES`."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from quantized_checkpoint import Sample

TESTS = Path(__file__).parents[2] / "services/gpu_worker/quantization/formats"


def load_samples() -> dict[str, Sample]:
    found: dict[str, Sample] = {}
    for file in sorted(TESTS.glob("test_*.py")):
        spec = spec_from_file_location(f"samples_of_{file.stem}", file)
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        found |= module.SAMPLES
    return found

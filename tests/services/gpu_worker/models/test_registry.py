"""The table of architectures, shared by launcher and worker."""

from pathlib import Path

import pytest
from tiny_models import MODELS
from tiny_poolers import DECODERS, ENCODERS

from blockyard.services.gpu_worker.models import registry
from blockyard.services.gpu_worker.models.llama_style import llama, qwen2
from blockyard.services.gpu_worker.models.registry import find_family
from blockyard.shared.architectures import ARCHITECTURES, REFUSED
from blockyard.shared.config.model_documents import TABLES, markdown
from blockyard.shared.errors import ConfigError

REWARDS = {"Qwen2ForRewardModel", "Qwen2ForProcessRewardModel"}  # compared in test_output_layers
FAMILIES = Path(registry.__file__).parent


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_has_a_module_a_build_and_a_tiny_model(name: str) -> None:
    assert (FAMILIES / f"{ARCHITECTURES[name].module.replace('.', '/')}.py").is_file()
    build = find_family({"architectures": [name]})
    assert callable(build)
    assert build.__module__.endswith(f".{ARCHITECTURES[name].module}")
    tiny_models = [*MODELS, *ENCODERS, *DECODERS]
    assert name in {tiny.architecture for tiny in tiny_models} | REWARDS, "parity tests compare them with transformers"


def test_every_family_is_in_the_table() -> None:
    paths = [path for path in FAMILIES.rglob("*.py") if "\ndef build(" in path.read_text()]
    files = {".".join(path.relative_to(FAMILIES).with_suffix("").parts) for path in paths}
    assert files - {registry.TRANSFORMERS} == {found.module for found in ARCHITECTURES.values()}
    assert not ARCHITECTURES.keys() & REFUSED.keys()


def test_the_first_supported_architecture_is_taken() -> None:
    assert find_family({"architectures": ["Unknown", "Qwen2ForCausalLM"]}) is qwen2.build
    assert find_family({"architectures": ["LlamaForCausalLM"]}) is llama.build


@pytest.mark.parametrize(
    ("name", "near"), [("Qwen3ForCausalLMs", "Qwen3ForCausalLM"), ("OPTForCausalML", "OPTForCausalLM")]
)
def test_an_unknown_architecture_is_refused_with_the_nearest(name: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is not supported; the nearest that is: {near}; `blockyard models`"):
        find_family({"architectures": [name]})


def test_the_document_has_the_table() -> None:
    document = (FAMILIES / "FAMILIES.md").read_text("utf-8")
    assert TABLES.written_in(document) == document, f"run `{TABLES.written_by}`"
    assert all(f"`{name}`" in markdown() for name in (*ARCHITECTURES, *REFUSED))

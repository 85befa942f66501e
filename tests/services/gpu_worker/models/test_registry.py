"""The table of architectures, shared by launcher and worker."""

import pytest

from blockyard.services.gpu_worker.models import llama, qwen2
from blockyard.services.gpu_worker.models.registry import find_family
from blockyard.shared.architectures import SUPPORTED
from blockyard.shared.errors import ConfigError


def test_every_architecture_of_the_table_has_a_family() -> None:
    assert all(callable(find_family({"architectures": [name]})) for name in SUPPORTED)
    assert find_family({"architectures": ["Unknown", "Qwen2ForCausalLM"]}) is qwen2.build
    assert find_family({"architectures": ["LlamaForCausalLM"]}) is llama.build


def test_an_unknown_architecture_is_refused_with_the_list() -> None:
    with pytest.raises(ConfigError, match="GPT2LMHeadModel is not supported; supported are LlamaForCausalLM, "):
        find_family({"architectures": ["GPT2LMHeadModel"]})

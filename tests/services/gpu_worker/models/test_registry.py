"""The families, and the list of them that the launcher checks before it starts anything."""

import pytest

from blockyard.services.gpu_worker.models.registry import FAMILIES, find_family
from blockyard.shared.architectures import SUPPORTED
from blockyard.shared.errors import ConfigError


def test_the_launcher_knows_what_the_worker_runs() -> None:
    assert sorted(FAMILIES) == sorted(SUPPORTED)


def test_an_unknown_architecture_is_refused_with_the_list() -> None:
    with pytest.raises(ConfigError, match="GPT2LMHeadModel is not supported; supported are LlamaForCausalLM, "):
        find_family({"architectures": ["GPT2LMHeadModel"]})

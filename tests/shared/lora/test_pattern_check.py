"""Regular expressions of an adapter's config that take exponential time."""

import re
from typing import Any

import pytest

from blockyard.shared.errors import AdapterError
from blockyard.shared.lora.adapter_config import AdapterConfig
from blockyard.shared.lora.pattern_check import check_patterns

NAMES = [f"model.layers.{layer}.self_attn.{name}_proj" for layer in range(40) for name in "qkvo"]
SLOW = "(([a-z_.0-9]+)+)+!"


@pytest.mark.parametrize(
    "fields",
    [{"rank_pattern": {"q_proj": 2, f"v|{SLOW}": 3}}, {"layers_pattern": ["layers", SLOW]}],
)
def test_a_pattern_that_takes_too_long_is_refused_by_its_field(fields: dict[str, Any]) -> None:
    [field] = fields
    with pytest.raises(AdapterError, match=rf"^adapter_config\.json: {field} '.*{re.escape(SLOW)}'.* in 1 s of CPU"):
        check_patterns(AdapterConfig(**fields), NAMES)


def test_a_pattern_for_each_module() -> None:
    """As AdaLoRA writes them."""
    config = AdapterConfig(rank_pattern={f"layers.{i}.q_proj": i + 1 for i in range(1000)})
    check_patterns(config, names := [f"model.layers.{i}.q_proj" for i in range(1000)])
    assert [config.rank_of(name) for name in names] == list(range(1, 1001))
    with pytest.raises(AdapterError, match=r"its patterns and 20000 modules need 20000000 matches: too many"):
        check_patterns(config, [str(i) for i in range(20_000)])


def test_usual_patterns_are_taken() -> None:
    usual = r"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:q_proj|k_proj))|(?:\bmodel\.layers\.\d+\.(?:mlp).*)"
    config = AdapterConfig(target_modules=usual, rank_pattern={r"layers\.1\..*": 2}, alpha_pattern={"q_proj": 3.0})
    check_patterns(config, NAMES)

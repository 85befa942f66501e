"""No setting is ignored: each field of a service's struct is read by the service or by shared code."""

import functools
import re
from pathlib import Path

import msgspec
import pytest

from blockyard.services.api_gateway.requests.schemas import CompletionRequest
from blockyard.shared.config.services.detokenizer import DetokenizerConfig
from blockyard.shared.config.services.gateway import CorsConfig, GatewayConfig, ParserPlugins, TlsConfig
from blockyard.shared.config.services.registry import RegistryConfig
from blockyard.shared.config.services.scheduler import SchedulerConfig
from blockyard.shared.config.services.tokenizer import TokenizerConfig
from blockyard.shared.config.services.worker import KVTransferConfig, MockConfig, WorkerConfig
from blockyard.shared.messages import GrammarDefaults, ModelSettings, SamplingDefaults, ToolDefaults
from blockyard.shared.ring_client.request_fields import limits
from blockyard.shared.ring_client.request_fields.sampling_fields import read_sampling

ROOT = Path(__file__).parents[3]
SHARED = [path for path in (ROOT / "shared").rglob("*.py") if "config" not in path.relative_to(ROOT).parts]
FOLDERS = {"gpu_worker": ("gpu_worker", "kv_transfer")}  # that read a service's settings, if it is not one folder
READERS: list[tuple[str, type[msgspec.Struct]]] = [
    *(("api_gateway", kind) for kind in (GatewayConfig, CorsConfig, TlsConfig, ParserPlugins)),
    *(("api_gateway", kind) for kind in (ModelSettings, SamplingDefaults, GrammarDefaults, ToolDefaults)),
    *(("gpu_worker", kind) for kind in (WorkerConfig, MockConfig, KVTransferConfig)),
    ("detokenizer", DetokenizerConfig),
    ("message_bus", RegistryConfig),
    ("scheduler", SchedulerConfig),
    ("tokenizer_pool", TokenizerConfig),
]
READ = re.compile(r"\b(?:_?config|cors|tls|plugins|settings|defaults|tools|mock)\.(?=(\w+))")


@functools.cache
def fields_read_by(service: str) -> set[str]:
    folders = [ROOT / "services" / name for name in FOLDERS.get(service, (service,))]
    sources = [*SHARED, *(path for folder in folders for path in folder.rglob("*.py"))]
    return {field for path in sources for field in READ.findall(path.read_text("utf-8"))}


@pytest.mark.parametrize(
    ("service", "field"),
    [(service, field) for service, kind in READERS for field in kind.__struct_fields__],
)
def test_a_setting_is_read(service: str, field: str) -> None:
    if field in limits.RANGES:  # read in a loop: a default that is no default of `Sampling` reaches it
        other = SamplingDefaults(**{field: 0.5 if "p" in field.split("_") else 2})
        assert getattr(read_sampling(CompletionRequest(), None, other), field) == getattr(other, field)
        return
    assert field in fields_read_by(service)

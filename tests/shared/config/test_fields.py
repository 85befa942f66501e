"""Each flag sets its fields in the services' settings, and impossible values are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from blockyard.shared.config import parsed_flags, resolve
from blockyard.shared.config.checkpoint import Checkpoint
from blockyard.shared.config.flags import FLAGS
from blockyard.shared.config.flags.flag import Flag, FlagKind
from blockyard.shared.config.resolve import Deployment
from blockyard.shared.config.services.process import BusConfig
from blockyard.shared.config.services.scheduler import SchedulerConfig
from blockyard.shared.errors import ConfigError

BUS = BusConfig(registry="ipc:///run/x/message-bus", bind="ipc:///run/x")
CONFIG = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096, "vocab_size": 4096}
FP8 = ("--kv-cache-dtype", "fp8")
NEEDS: dict[str, tuple[str, ...]] = {
    "max-long-partial-prefills": ("--max-num-partial-prefills", "9"),
    "ssl-keyfile": ("--ssl-certfile", __file__),
    "ssl-certfile": ("--ssl-keyfile", __file__),
    "quantization-param-path": FP8,
    "calculate-kv-scales": FP8,
}  # flags that need another flag
# every one of the scheduler's, each with another value than its default
SCHEDULING = """
    --max-num-seqs 7 --max-num-batched-tokens 70 --scheduling-policy priority --scheduler-delay-factor 0.5
    --max-num-partial-prefills 4 --max-long-partial-prefills 2 --long-prefill-token-threshold 50
    --no-enable-prefix-caching --run-ahead 3 --max-queue-len 5 --max-queue-tokens 99 --max-queue-delay 9
    --enable-sleep-mode --disable-log-stats --decode-prefill-tokens 9
    --no-scheduler-reserve-full-isl --watermark 0.2
    --kv-transfer-config.kv_load_failure_policy fail --kv-transfer-config.kv_connector_extra_config.kv_lease_duration 9
"""
NUMBERS = [flag for flag in FLAGS.values() if flag.ge is not None and "-1" not in flag.named_values]


def deploy(*args: str) -> Deployment:
    values = parsed_flags.Values(parsed_flags.from_command_line(args)[0])
    model = Checkpoint(name="org/m", path=Path("/m"), tokenizer_path=Path("/t"), config=CONFIG)
    return resolve.resolve(values, model, BUS)


def other_value(flag: Flag) -> Any:
    match flag.kind:
        case FlagKind.BOOL:
            return not flag.default
        case FlagKind.INT | FlagKind.SIZE | FlagKind.FLOAT if not flag.choices:
            least = flag.ge or 0.0
            number = 0.5 if flag.le == 1 else least + 3 if flag.default != least + 3 else least + 4
            return number if flag.kind is FlagKind.FLOAT else int(number)
        case FlagKind.LIST:
            return ["a", "b"]
        case FlagKind.JSON:
            return {"some": 1}
    if flag.choices:
        word = next(choice for choice in flag.choices if choice != str(flag.default))
        return int(word) if flag.kind is FlagKind.INT else word
    if flag.name == "lora-dir":
        return str(Path(__file__).parent)  # must exist
    return __file__ if flag.name.startswith("ssl") or flag.name.endswith("path") else "some"


def field_of(ring: Deployment, path: str) -> Any:
    service, *names = path.split(".")
    found: Any = {
        "gateway": ring.gateways[0],
        "tokenizer": ring.tokenizers[0],
        "scheduler": ring.scheduler,
        "worker": ring.workers[0],
    }[service]
    for name in names:
        found = getattr(found, name)
    return found


@pytest.mark.parametrize("flag", [flag for flag in FLAGS.values() if flag.to], ids=lambda flag: flag.name)
def test_its_value_is_what_the_services_are_told(flag: Flag) -> None:
    value = other_value(flag)
    if isinstance(value, dict):
        words = [json.dumps(value)]
    else:
        words = value if isinstance(value, list) else [value if isinstance(value, str) else str(value).lower()]
    ring = deploy(f"--{flag.name}", *words, *NEEDS.get(flag.name, ()))
    for path in flag.to:
        expected = not value if path.startswith("!") else value
        assert field_of(ring, path.lstrip("!")) == expected
        if not flag.name.startswith("ssl"):  # one without the other is refused
            assert field_of(deploy(*NEEDS.get(flag.name, ())), path.lstrip("!")) != expected, "it is so anyway"


def test_a_scheduler_has_no_setting_that_no_flag_reaches() -> None:
    plain, other = deploy().scheduler, deploy(*SCHEDULING.split()).scheduler
    same = {name for name in SchedulerConfig.__struct_fields__ if getattr(plain, name) == getattr(other, name)}
    named = {"process", "served_model_names", "root", "model", "block_scope", "stats_interval_s"}
    assert same == named | {"enable_chunked_prefill", "adapters"}
    assert deploy("--lora-max-wait", "3").scheduler.adapters.max_wait_s == 3
    assert not deploy("--no-enable-chunked-prefill").scheduler.enable_chunked_prefill


@pytest.mark.parametrize("flag", NUMBERS, ids=lambda flag: flag.name)
def test_less_than_the_least_is_refused_with_the_least(flag: Flag) -> None:
    assert flag.ge is not None
    wrong = -1 if flag.ge >= 0 else flag.ge - 1
    with pytest.raises(ConfigError, match=f"--{flag.name}: must be at least {flag.ge:.15g}, got {wrong}"):
        deploy(f"--{flag.name}", str(wrong))


@pytest.mark.parametrize("flag", [flag for flag in FLAGS.values() if flag.choices], ids=lambda flag: flag.name)
def test_an_unknown_word_is_refused_with_those_there_are(flag: Flag) -> None:
    wrong = "77" if flag.kind is FlagKind.INT else "lottery"
    with pytest.raises(ConfigError, match=f"--{flag.name}: .*{wrong}.* is none of {', '.join(flag.choices)}"):
        deploy(f"--{flag.name}", wrong)

"""What `AsyncLLMEngine` has besides requests: health, sleep, caches, and refusals of what only vLLM has."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NoReturn

from blockyard.services.offline.adapters.requests import LoRARequest
from blockyard.services.offline.engines.llm_engine import NO_PINS, EngineModelConfig, LLMEngine
from blockyard.services.offline.metrics import Counter, Gauge
from blockyard.services.offline.operations import MODES, PROFILE_FROM_OUTSIDE
from blockyard.services.offline.outputs import RingLost
from blockyard.services.offline.running_model import RunningModel
from blockyard.services.offline.tokenizer import LLMTokenizer
from blockyard.shared.errors import RequestError, not_built
from blockyard.shared.messages import Control, Controlled, ControlVerb

log = logging.getLogger(__name__)

NO_WEIGHTS = "the model is in another process, and its weights are those of its folder"
LOGGED = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:generation_tokens")


def _refused(name: str, instead: str = "") -> Callable[..., Coroutine[Any, Any, NoReturn]]:
    """A method of vLLM's that always raises RequestError, which names it."""

    async def method(_: "AsyncOperations", *__: object, **___: object) -> NoReturn:
        raise not_built(name, instead)

    return method


class AsyncOperations:
    """Base of AsyncLLMEngine. Methods raise RequestError, a ValueError, and without a ring RingLost."""

    def __init__(self, running: RunningModel) -> None:
        self._running, self._session = running, running.session
        self._operations = LLMEngine(running)  # its calls wait: they are made in threads

    async def get_tokenizer(self, lora_request: LoRARequest | None = None) -> LLMTokenizer:
        return await asyncio.to_thread(self._running.tokenizer)

    async def get_model_config(self) -> EngineModelConfig:
        return self.model_config

    @property
    def model_config(self) -> EngineModelConfig:
        return self._operations.model_config

    @property
    def is_running(self) -> bool:
        return not self._session.end_reason

    @property
    def is_stopped(self) -> bool:
        return not self.is_running

    @property
    def errored(self) -> bool:
        return not self.is_running

    @property
    def dead_error(self) -> RingLost:
        return RingLost(self._session.end_reason or "the ring runs")

    async def check_health(self) -> None:
        """Raises RingLost if the ring has ended."""
        if not self.is_running:
            raise self.dead_error

    async def get_supported_tasks(self) -> tuple[str, ...]:
        """The tasks of requests: "generate", or that of a pooling model."""
        pooling = self._session.card.pooling
        return ("generate",) if pooling is None else (pooling.task.value,)

    async def is_tracing_enabled(self) -> bool:
        """False: no service sends traces."""
        return False

    async def do_log_stats(self) -> None:
        """Logs how many requests run and wait, and the number of tokens so far."""
        found = await asyncio.to_thread(self._operations.get_metrics)
        values = [f"{m.name} {m.value:g}" for m in found if m.name in LOGGED and isinstance(m, Gauge | Counter)]
        log.info("%s", ", ".join(values))

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        return await asyncio.to_thread(self._operations.reset_prefix_cache)

    async def reset_mm_cache(self) -> None:
        """Has no effect: prompts are text."""

    async def reset_encoder_cache(self) -> None:
        """Has no effect: prompts are text."""

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        await asyncio.to_thread(self._operations.sleep, level, mode)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        await asyncio.to_thread(self._operations.wake_up, tags)

    async def is_sleeping(self) -> bool:
        return await asyncio.to_thread(self._operations.is_sleeping)

    async def pause_generation(
        self, *, mode: str = "abort", wait_for_inflight_requests: bool | None = None, clear_cache: bool = True
    ) -> None:
        """New requests wait until `resume_generation`. mode: what running ones do, as of `LLM.sleep`."""
        mode = "wait" if wait_for_inflight_requests else mode
        if mode not in MODES:
            raise RequestError(f"mode must be one of {', '.join(MODES)}, got {mode!r}", "mode")
        if mode == "abort":
            await asyncio.to_thread(self._session.abort, "generation was paused")
        await self._ask(Control("", ControlVerb.PAUSE, drain=mode == "wait", clear_cache=clear_cache))

    async def resume_generation(self) -> None:
        await self._ask(Control("", ControlVerb.RESUME))

    async def is_paused(self) -> bool:
        states = await self._ask(Control("", ControlVerb.STATUS))
        return any(state.paused for state in states)

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Loads an adapter, so that its first request need not wait for it."""
        return await asyncio.to_thread(self._operations.add_lora, lora_request)

    async def remove_lora(self, lora_id: int) -> bool:
        return await asyncio.to_thread(self._operations.remove_lora, lora_id)

    async def list_loras(self) -> set[int]:
        return await asyncio.to_thread(self._operations.list_loras)

    async def collective_rpc(self, *_: object, **__: object) -> None:
        self._operations.collective_rpc()

    add_request = _refused("add_request", "`generate` returns the outputs of a request")
    get_vllm_config = _refused("get_vllm_config", "`model_config` has the model's name, length and vocabulary")
    start_profile = _refused("start_profile", PROFILE_FROM_OUTSIDE)
    stop_profile = _refused("stop_profile", PROFILE_FROM_OUTSIDE)
    pin_lora = _refused("pin_lora", NO_PINS)
    scale_elastic_ep = _refused("scale_elastic_ep", "the number of workers is set at start")
    init_weight_transfer_engine = _refused("init_weight_transfer_engine", NO_WEIGHTS)
    update_weights = _refused("update_weights", NO_WEIGHTS)
    checkpoint_prepare = _refused("checkpoint_prepare", "`sleep` frees the memory of a device")
    checkpoint_restore = _refused("checkpoint_restore", "`wake_up` takes the memory of a device again")

    async def _ask(self, control: Control) -> list[Controlled]:
        return await asyncio.wrap_future(self._session.start_call(lambda client: client.controls.ask(control)))

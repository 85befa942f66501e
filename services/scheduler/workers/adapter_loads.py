"""Loads adapters into workers and unloads them: at the start, for operators, and by need of sequences."""

import logging
from dataclasses import dataclass

from blockyard.services.scheduler.adapters.group_adapters import GroupAdapters
from blockyard.services.scheduler.adapters.group_prompts import GroupPrompts
from blockyard.services.scheduler.adapters.registry import Adapter, AdapterRegistry
from blockyard.services.scheduler.admission.model_limits import ModelLimits, Refusal, ServedModel
from blockyard.services.scheduler.admission.request_handler import RequestHandler
from blockyard.services.scheduler.batch.worker_groups import WorkerGroup, WorkerGroups
from blockyard.services.scheduler.lifecycle.lifecycle import Lifecycle
from blockyard.services.scheduler.outbox import Outbox
from blockyard.services.scheduler.queue.adapter_waits import Adapters, AdapterWaits, Wait
from blockyard.shared.config.services.lora import AdapterSettings
from blockyard.shared.errors import LoadError
from blockyard.shared.messages import (
    AdapterLoaded,
    Control,
    Controlled,
    ControlVerb,
    DropAdapter,
    LoadAdapter,
)

log = logging.getLogger(__name__)

NOT_SERVED = "this server serves no adapters: --enable-lora"
NO_PROMPTS = "this server serves no prompt adapters: --enable-prompt-adapter"
MAX_OPEN_LOADS = 64  # of operators; more are refused until some are done


Holder = GroupAdapters | GroupPrompts


@dataclass(slots=True, eq=False)
class OpenLoad:
    """An adapter that workers read before requests may name it."""

    adapter: Adapter
    awaits: set[int]  # workers
    gateway: int | None = None  # that is to be answered; None: the load is of the start
    request_id: str = ""
    error: str = ""
    status: int = 400  # of the error
    has_been_read: bool = False


class AdapterLoads:
    def __init__(
        self,
        scheduler: int,
        base: ServedModel,
        settings: AdapterSettings,
        groups: WorkerGroups,
        registry: AdapterRegistry,
        waits: AdapterWaits,
        lifecycle: Lifecycle,
        requests: RequestHandler,
        model_limits: ModelLimits,
        outbox: Outbox,
    ) -> None:
        self._registry, self._waits = registry, waits
        self._scheduler, self._names, self._created = scheduler, base.names, base.created
        self._groups, self._lifecycle, self._outbox = groups.attached, lifecycle, outbox
        self._requests, self._model_limits = requests, model_limits
        self._max_wait_s, self._leaves_out_broken = settings.max_wait_s, settings.leaves_out_broken
        self._loads: list[OpenLoad] = []
        self._unloads: list[tuple[int, Control, Adapter]] = []
        self._is_dirty = False
        for source in settings.sources:
            columns = (source.name, source.path, source.parent or base.names[0], base.created)
            adapter = self._registry.add(*columns, is_prompt=source.is_prompt)
            self._loads.append(OpenLoad(adapter, set()))
        self.notes: list[str] = []

    @property
    def is_settled(self) -> bool:
        """Whether the adapters of the start were read, or were refused."""
        return not any(load.gateway is None for load in self._loads)

    @property
    def phase(self) -> str:
        """What the start waits for; empty: for no adapter."""
        if self.is_settled or not self._groups:
            return ""
        for load in self._loads:
            if not self._serve_any(load.adapter.is_prompt):
                return f"waiting for a worker with --enable-{'prompt-adapter' if load.adapter.is_prompt else 'lora'}"
        return "reading adapters"

    # workers

    def on_attached(self, worker: int) -> None:
        """A worker begins without adapters, and has forgotten what it was asked to read.

        It reads the served adapters, LoRA adapters as far as its host memory has room.
        """
        self._is_dirty, group = True, self._groups[worker]
        for adapter in self._registry.served()[: group.geometry.num_host_adapters]:
            group.adapters.want(adapter)
        for adapter in self._registry.served(are_prompts=True):
            group.prompts.want(adapter)
        for load in self._loads:
            load.awaits.discard(worker)
            if not load.has_been_read and not load.awaits:
                self._ask(load, worker)
            if load.gateway is not None and not self._serve_any(load.adapter.is_prompt):
                load.error = NO_PROMPTS if load.adapter.is_prompt else NOT_SERVED
        self._settle_loads()

    def on_lost(self, worker: int) -> None:
        for load in self._loads:
            if worker in load.awaits:
                load.awaits.discard(worker)
                if not load.awaits and not load.has_been_read:  # the next worker is asked
                    for other in list(self._groups):
                        self._ask(load, other)
        self._settle_loads()

    def on_gateway_lost(self, gateway: int) -> None:
        """Its commands are carried out, and no gateway is answered."""
        self._unloads = [one for one in self._unloads if one[0] != gateway]

    def on_loaded(self, worker: int, frame: AdapterLoaded) -> None:
        group, adapter = self._groups.get(worker), self._registry.all.get(frame.adapter)
        if group is None or adapter is None:
            return
        self._is_dirty, error = True, frame.error
        differs = not error and adapter.digest not in (b"", frame.digest)
        adapter.error, adapter.status = error or ("its bytes have changed" if differs else ""), frame.status
        if not adapter.error:
            adapter.learn(frame)
        _holder(group, adapter).on_loaded(frame.adapter, is_usable=not adapter.error)
        if differs:  # the name is served elsewhere
            self._outbox.send(worker, DropAdapter(self._scheduler, frame.adapter))
            log.warning(
                "adapter %s is not served by worker %x: %s has other bytes there than on another worker",
                *(adapter.name, worker, adapter.path),
            )
        for note in frame.notes:
            log.warning("adapter %s: %s", adapter.name, note)
        if error:
            columns = (adapter.name, worker, adapter.path, error)
            log.warning("adapter %s is not served by worker %x: %s: %s", *columns)
        for load in self._loads:
            if load.adapter is adapter and worker in load.awaits:
                load.awaits.discard(worker)
                if error and not load.error:
                    load.error, load.status = error, frame.status
                load.has_been_read = load.has_been_read or not adapter.error
        self._settle_loads()

    def step(self, now: float) -> None:
        """Asks workers for adapters that sequences wait for, and frees unused ones. To be called in each step."""
        if self._registry.has_unused:
            for retired in self._registry.take_unused():
                self._drop(retired)
            self._model_limits.update_adapters()
        groups = self._groups.values()
        wants = any(one.adapters.has_work or one.prompts.has_work for one in groups)  # sequences go elsewhere meanwhile
        if not self._is_dirty and not wants and not self._waits.deferred:
            return
        self._is_dirty = False
        wanted = self._waits.wanted(now)
        for wait in [one for one in self._waits.deferred if self._groups and self._is_refused_everywhere(one.beside)]:
            self._fail_all(wait)
            wanted = self._waits.wanted(now)  # what it waited for is not read again for nobody
        for adapter in [one for one in self._waits.released if not self._registry.is_used(one)]:
            self._waits.on_started(adapter)
        since = wanted | self._waits.released
        waiting = sorted(since, key=lambda one: (since[one], one))  # the same order in each step
        overdue = [
            one
            for one in waiting
            if one in wanted and now - since[one] >= self._max_wait_s and not self._registry.all[one].is_prompt
        ]
        for worker, group in self._groups.items():
            for adapter in wanted:
                _holder(group, self._registry.all[adapter]).want(adapter)
            self._make_room(group, overdue, now)
            for holder in (group.adapters, group.prompts):
                if holder.has_work:
                    self._change_host_memory(worker, holder, waiting)

    def _make_room(self, group: WorkerGroup, overdue: list[int], now: float) -> None:
        """Adapters have waited for a place for long: another one takes no new sequences, and after as long has none."""
        closed = group.adapters.make_room(overdue, now)
        if closed is not None and closed.closed_s is not None and now - closed.closed_s >= self._max_wait_s:
            place = group.adapters.index(closed)
            for running in [one for one in group.running if one.adapter_place == place]:
                self._lifecycle.preempt(group, running)

    def _change_host_memory(self, worker: int, holder: Holder, waiting: list[int]) -> None:
        changes = holder.take_changes(waiting)
        for number in changes.drop:
            self._outbox.send(worker, DropAdapter(self._scheduler, number))
        for number in changes.load:
            adapter = self._registry.all[number]
            columns = (self._scheduler, number, adapter.path, adapter.is_prompt)
            self._outbox.send(worker, LoadAdapter(*columns))

    def _is_refused_everywhere(self, numbers: Adapters) -> bool:
        """Whether each group refuses one of these adapters."""
        adapters = [self._registry.all[number] for number in numbers]
        return all(
            any(_holder(group, one).is_refused(one.number) for one in adapters) for group in self._groups.values()
        )

    def _fail_all(self, wait: Wait) -> None:
        """No worker could read what sequences wait for. An adapter that none could read is tried again for the next
        request."""
        adapters = [self._registry.all[number] for number in wait.beside]
        unread = [one for one in adapters if self._is_refused_everywhere((one.number,))]
        if unread:
            cause = unread[0].error or (NO_PROMPTS if unread[0].is_prompt else NOT_SERVED)
            status = unread[0].status if unread[0].error else 400
            refusal = Refusal(status, "model", f"no worker can read the adapter {unread[0].name!r}: {cause}")
        else:
            names = " and ".join(repr(one.name) for one in adapters)
            refusal = Refusal(400, "model", f"no worker can read both of the adapters {names}")
        for request in {sequence.request.id: sequence.request for sequence in self._waits.sequences(wait)}.values():
            self._requests.end_unservable(request, refusal)
        for one in unread:
            for group in self._groups.values():
                _holder(group, one).retry(one.number)

    # operators

    def take(self, gateway: int, frame: Control) -> None:
        """Carries out a command to load or to unload. It is answered now or later."""
        if frame.verb is ControlVerb.LOAD_ADAPTER:
            self._load(gateway, frame)
        else:
            self._unload(gateway, frame)

    def _load(self, gateway: int, frame: Control) -> None:
        if (refusal := self._refusal_of_load(frame)) is not None:
            status, cause = refusal
            self._answer(gateway, frame.request_id, status, cause, _field(frame.is_prompt, "name"))
            return
        name = frame.adapter  # it waits for a worker if there is none, or if they sleep
        columns = (name, frame.adapter_path, self._names[0], self._created)
        adapter = self._registry.add(*columns, is_prompt=frame.is_prompt, was_asked_for=True)
        self._loads.append(load := OpenLoad(adapter, set(), gateway, frame.request_id))
        for worker in list(self._groups):
            self._ask(load, worker)

    def _refusal_of_load(self, frame: Control) -> tuple[int, str] | None:
        """Status and cause; None: the adapter is loaded."""
        name, served = frame.adapter, self._registry.named(frame.adapter)
        serves_none = bool(self._groups) and not self._serve_any(frame.is_prompt)
        if frame.first_use and (serves_none or self._registry.is_unloaded(name)):
            return 404, f"the model {name!r} does not exist"
        if served is not None and served.path == frame.adapter_path and not frame.replace:
            return 400, f"{name!r} is loaded already"
        if served is not None and not frame.replace:
            return 400, f"{name!r} is in use; load_inplace replaces it"
        if name in self._names:
            return 400, f"{name!r} is the name of the model itself"
        if any(load.adapter.name == name for load in self._loads):
            return 409, f"{name!r} is being loaded"
        if len(self._loads) >= MAX_OPEN_LOADS:
            return 429, f"{len(self._loads)} adapters are being loaded"
        if serves_none:
            return 400, NO_PROMPTS if frame.is_prompt else NOT_SERVED
        if frame.is_prompt and self._groups and served is None:
            most = min(group.prompts.num_most for group in self._groups.values() if group.prompts.serves_any)
            if (loaded := self._registry.num_prompts) >= most:
                return 400, f"{loaded} prompt adapters are loaded, and --max-prompt-adapters is {most}: unload one"
        return None

    def _serve_any(self, is_prompt: bool) -> bool:
        """Whether a worker serves adapters of a kind."""
        return any((group.prompts if is_prompt else group.adapters).serves_any for group in self._groups.values())

    def _unload(self, gateway: int, frame: Control) -> None:
        served = self._registry.named(frame.adapter)
        if frame.is_repeated:
            self._repeat_unload(frame.adapter, served)
            self._answer(gateway, frame.request_id, 200, "")
            return
        if served is None or served.is_prompt != frame.is_prompt:
            cause = f"{frame.adapter!r} is not loaded"
            self._answer(gateway, frame.request_id, 404, cause, _field(frame.is_prompt, "name"))
            return
        self._registry.unload(served.name)
        self._model_limits.update_adapters()
        self._unloads.append((gateway, frame, served))
        self._is_dirty = True

    def _repeat_unload(self, name: str, served: Adapter | None) -> None:
        """Unloads what the flags name, and bars the name for requests. Each gateway asks for it, some of them late."""
        is_asked_for = served is not None and served.was_asked_for
        if is_asked_for or any(load.gateway is not None and load.adapter.name == name for load in self._loads):
            return
        self._registry.unload(name)
        self._model_limits.update_adapters()
        self._is_dirty = True

    def _ask(self, load: OpenLoad, worker: int) -> None:
        holder = _holder(self._groups[worker], load.adapter)
        if not holder.is_refused(load.adapter.number):
            load.awaits.add(worker)
            holder.want(load.adapter.number)
            self._is_dirty = True

    def _settle_loads(self) -> None:
        """Serves adapters that all asked workers have read; refuses any that one could not read.

        Raises LoadError for one of the start, unless the settings leave it out.
        """
        for load in [one for one in self._loads if not one.awaits and (one.error or one.has_been_read)]:
            self._loads.remove(load)
            self._is_dirty = True
            adapter = load.adapter
            if load.error:
                self._registry.retire(adapter)
                if load.gateway is None and not self._leaves_out_broken:
                    raise LoadError(f"adapter {adapter.name}: {adapter.path}: {load.error}")
                if load.gateway is None:
                    self.notes.append(f"adapter {adapter.name} is not served: {load.error}")
                    log.error("adapter %s is not served: %s: %s", adapter.name, adapter.path, load.error)
            else:
                self._registry.serve(adapter)
                self._model_limits.update_adapters()
                for group in self._groups.values() if adapter.is_prompt else ():  # all hold it, also those not asked
                    group.prompts.want(adapter.number)
                log.info("adapter %s is served: %s", adapter.name, adapter.path)
            if load.gateway is not None:
                status, cause = (load.status, f"adapter {adapter.name!r}: {load.error}") if load.error else (200, "")
                field = _field(adapter.is_prompt, "path")
                self._answer(load.gateway, load.request_id, status, cause, field)

    def _drop(self, adapter: Adapter) -> None:
        """Drops an adapter everywhere that no request uses."""
        for worker, group in self._groups.items():
            if _holder(group, adapter).forget(adapter.number):
                self._outbox.send(worker, DropAdapter(self._scheduler, adapter.number))
        for gateway, frame, unloaded in self._unloads.copy():
            if unloaded is adapter:
                self._unloads.remove((gateway, frame, unloaded))
                self._answer(gateway, frame.request_id, 200, "")

    def _answer(self, gateway: int, request_id: str, status: int, message: str, field: str = "") -> None:
        cards = self._registry.cards if status != 429 else None  # a flood of commands is refused in few bytes
        field = field if status >= 400 else ""
        unloaded = self._registry.unloaded if cards is not None else []
        answer = Controlled(request_id, status, message, 0, False, field=field, adapters=cards, unloaded=unloaded)
        self._outbox.answer(gateway, answer)


def _field(is_prompt: bool, about: str) -> str:
    """The field of an operator's request."""
    return f"{'prompt_adapter' if is_prompt else 'lora'}_{about}"


def _holder(group: WorkerGroup, adapter: Adapter) -> Holder:
    """What knows of a group whether it has an adapter."""
    return group.prompts if adapter.is_prompt else group.adapters

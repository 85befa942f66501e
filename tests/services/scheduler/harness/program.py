"""Turns bytes into a history of arrivals, aborts, deaths and delays in any order. Zeros give an undisturbed one."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from blockyard.services.gpu_worker.mock.adapters import BROKEN
from blockyard.services.scheduler.planning.partial_prefill_limits import PartialPrefillLimits
from blockyard.shared.messages import Beam, BeamStop, Cancel, Control, ControlVerb, LoadAdapter, MemoryTag, TokenStep

from .fakes import FakeGateway, ids_list
from .world import Shape, World

BYTES_PER_STEP = 3
MAX_MEMBERS = 2
PATIENCE = 4  # plans for each token

SHAPES: dict[str, list[object]] = {
    "depth": [0, 1, 2, 3, None],
    "num_blocks": list(range(6, 31)),
    "block_size": [1, 2, 3, 4, 5],
    "max_num_seqs": list(range(1, 9)),
    "max_num_batched_tokens": list(range(1, 25)),
    "max_model_len": list(range(16, 61)),
    "eos_every": [0, 6],
    "max_queue_len": [3, 100],
    "max_queue_tokens": [60, 10_000],
    "max_queue_delay_s": [None, 1.0],
    "partial_prefills": [
        PartialPrefillLimits(),
        PartialPrefillLimits(max_partial=2, long_tokens=5),
        PartialPrefillLimits(max_partial=3, max_long=2),
    ],
    "delay_factor": [0.0, 0.5],
    "whole_prompts": [False, True],
    "reserve_whole_prompts": [False, True],
    "watermark": [None, 0.0, 0.3],
    "late_masks": [False, True],
    "host_waits": [0, 0, 1, 3],
    "policy": ["fcfs", "priority", "fair"],
    "prefix_caching": [True, True, True, False],
    "num_host_blocks": [0, 1, 5, 40],
    "failing": [False, True],
    "window": [None, None, None, 1, 5, 12],
    "pooling": ["", "", "", "encoder", "last", "mean"],
    "num_adapters": [0, 0, 3],
    "num_prompt_adapters": [0, 0, 2],
    "num_adapter_places": [1, 2],
    "num_host_adapters": [1, 2, 3],
    "num_stages": [1, 1, 2, 3],
    "balanced_context": [0, 5, 30],
}  # fields of a world's Shape

T = TypeVar("T")


def stops(step: TokenStep) -> bool:
    """Stop strings of this world: every third request has one, which most of its choices meet early."""
    return int(step.request_id) % 3 == 2 and step.finish is None and (step.first * 5 + step.choice) % 7 == 6


class Program:
    def __init__(self, shape: Shape) -> None:
        self.world = World(shape, stops)
        self.world.add_gateway()
        self.world.add_worker()
        self.world.add_detokenizer()
        self.max_workers = MAX_MEMBERS
        self.num_requests = self.num_searches = self.num_told = 0
        quiet = [self.work, self.submit, self.work, self.detokenize, self.work, self.submit, self.detokenize]
        self._rules: list[Callable[[int, int], None]] = quiet * 7
        self._rules += [
            self.cancel,
            self.resubmit,
            self.repeat,
            self.kill_worker,
            self.add_worker,
            self.kill_detokenizer,
            self.add_detokenizer,
            self.kill_gateway,
            self.out_of_step,
            self.wait,
            self.blink,
            self.operate,
            self.cancel,
            self.resubmit,
            self.lose_text,
            self.recover,
            self.spoil_load,
        ]

    def run(self, data: bytes) -> None:
        """Runs a history, then runs all requests to their end and checks the outputs."""
        for i in range(0, len(data) - BYTES_PER_STEP + 1, BYTES_PER_STEP):
            rule, a, b = data[i : i + BYTES_PER_STEP]
            self._rules[rule % len(self._rules)](a, b)
        world = self.world
        self._tell(ControlVerb.WAKE_UP)
        self._tell(ControlVerb.RESUME)
        if not world.workers:
            world.add_worker()
        if not world.detokenizers:
            world.add_detokenizer()
        for gateway in world.gateways.values():
            world.recover(gateway)
        self._settle()
        world.check_outputs()
        world.check_idle()

    def _settle(self) -> None:
        """No request starves: open requests end within a number of plans bounded by their tokens, also if preempted."""
        world = self.world
        live = world.core.lifecycle.requests.values()
        widths = [len(r.sequences) if r.frame.beam is None else r.frame.beam.width for r in live]
        tokens = sum(w * (r.num_prompt + r.frame.sampling.max_tokens) for w, r in zip(widths, live, strict=True))
        before = world.num_steps
        world.settle()
        most = PATIENCE * (1 + world.shape.host_waits) * (tokens + 20)
        assert world.num_steps - before <= most, f"{tokens} tokens took too many plans"

    def work(self, a: int, b: int) -> None:
        worker = pick(list(self.world.workers.values()), a)
        for _ in range(1 + b % 4 if worker else 0):
            self.world.work(worker, turn=b % 3 > 0)
        if not b % 3:
            self.world.turn()

    def detokenize(self, a: int, b: int) -> None:
        detokenizer = pick(list(self.world.detokenizers.values()), a)
        if detokenizer:
            self.world.detokenize(detokenizer)

    def submit(self, a: int, b: int) -> None:
        gateway = pick(list(self.world.gateways.values()), a)
        if gateway is None:
            gateway = self.world.add_gateway()
        self.num_requests += 1
        number = self.num_requests
        longest = self.world.shape.max_model_len + 3 if a % 4 == 3 else 10
        num_prompt = 1 + (a * 5 + b) % longest
        if self.world.shape.pooling:
            self._pool(gateway, str(number), num_prompt, a, b)
            return
        sampling: dict[str, object] = {"max_tokens": b % 12 if b < 128 else b % 40, "seed": number}
        if a % 5 == 4:
            sampling["num_logprobs"] = 2
        if a % 7 == 6:
            sampling["num_prompt_logprobs"] = 1
        if b % 9 == 8:
            sampling["ignore_eos"] = True
        beam = None
        if b % 6 == 3:
            self.num_searches += 1
            beam = Beam(1 + a % 3 + b % 2, (1.0, 0.0, -0.5, 2.0)[b % 4], BeamStop(a % 3))
            sampling |= {"temperature": 0.0, "max_tokens": 1 + b % 12}
            sampling.pop("num_prompt_logprobs", None)
        self.world.submit(
            gateway,
            str(number),
            num_prompt,
            1 + a % 3,
            self._prompt(a, b, num_prompt),
            tenant=f"key-{a % 3}",
            user=f"{b % 2}",
            priority=a % 5 - 2,
            beam=beam,
            batch_line=(a + b) % 6 == 5,
            adapter=self._adapter(a, b),
            prompt_adapter=self._prompt_adapter(a, b),
            **sampling,
        )

    def _pool(self, gateway: FakeGateway, name: str, longest: int, a: int, b: int) -> None:
        """Several prompts, of which some begin alike, and rarely one that is too long."""
        prompts = [[(j * 7 + b % 2) % 50 for j in range(1 + (longest + i * b) % longest)] for i in range(1 + a % 6)]
        self.world.pool(
            gateway,
            name,
            prompts,
            tenant=f"key-{a % 3}",
            user=f"{b % 2}",
            priority=a % 5 - 2,
            batch_line=(a + b) % 6 == 5,
            later_prompts=a % 4,
            later_tokens=b % 20,
            is_later=(a + b) % 7 == 3,
        )

    def _adapter(self, a: int, b: int) -> str:
        """A request in two has one, of those that are served."""
        served = [card.name for card in self.world.core.adapters.cards if not card.is_prompt]
        return served[(a + 3 * b) % len(served)] if served and b % 2 else ""

    def _prompt_adapter(self, a: int, b: int) -> str:
        """As `_adapter`, also beside one."""
        served = [card.name for card in self.world.core.adapters.cards if card.is_prompt]
        return served[(a + b) % len(served)] if served and b % 3 == 1 else ""

    def _prompt(self, a: int, b: int, num_prompt: int) -> list[int]:
        """Many prompts share a prefix, and some continue the output of another request."""
        prompt = [(i * 7 + b % 2) % 50 for i in range(num_prompt)]
        journals = [j for g in self.world.gateways.values() for j in g.journals.values()]
        earlier = pick(journals, b)
        if earlier is not None and a % 3 == 1:
            prompt = (ids_list(earlier.frame.prompt_ids) + earlier.outputs[0].ids + prompt)[:num_prompt]
        return prompt

    def cancel(self, a: int, b: int) -> None:
        for gateway, request_id in self._open(a):
            journal = gateway.pools.get(request_id) or gateway.journals[request_id]
            journal.cancelled = True
            for _ in range(1 + b % 2):
                self.world.tell(gateway.incarnation, Cancel(request_id, journal.frame.attempt))
            lifecycle = self.world.core.lifecycle
            assert request_id not in {**lifecycle.requests, **lifecycle.pools}, "it was cancelled"

    def resubmit(self, a: int, b: int) -> None:
        """A gateway sends a request again after a timeout or a lost frame."""
        for gateway, request_id in self._open(a):
            self.world.tell(gateway.incarnation, gateway.again(request_id))

    def repeat(self, a: int, b: int) -> None:
        """A Generate arrives twice while its request is open, and a Cancel of an earlier attempt arrives late."""
        for gateway, request_id in self._open(a):
            frame = (gateway.pools.get(request_id) or gateway.journals[request_id]).frame
            lifecycle = self.world.core.lifecycle
            if request_id in {**lifecycle.requests, **lifecycle.pools}:
                self.world.tell(gateway.incarnation, frame)
            self.world.tell(gateway.incarnation, Cancel(request_id, frame.attempt - 1))

    def kill_worker(self, a: int, b: int) -> None:
        worker = pick(list(self.world.workers.values()), a)
        if worker:
            if b % 3 == 2:
                self.world.break_down(worker.incarnation)
            else:
                self.world.kill(worker.incarnation)

    def add_worker(self, a: int, b: int) -> None:
        if len(self.world.workers) < self.max_workers:
            self.world.add_worker()

    def kill_detokenizer(self, a: int, b: int) -> None:
        detokenizer = pick(list(self.world.detokenizers.values()), a)
        if detokenizer:
            self.world.kill(detokenizer.incarnation)

    def add_detokenizer(self, a: int, b: int) -> None:
        if len(self.world.detokenizers) < MAX_MEMBERS:
            self.world.add_detokenizer()

    def kill_gateway(self, a: int, b: int) -> None:
        if len(self.world.gateways) == MAX_MEMBERS:
            self.world.kill(list(self.world.gateways)[a % MAX_MEMBERS])
        else:
            self.world.add_gateway()

    def out_of_step(self, a: int, b: int) -> None:
        """A worker could not decode a plan."""
        worker = pick(list(self.world.workers.values()), a)
        if worker and b % 3 == 0:
            worker.skip()
            self.world.work(worker)

    def spoil_load(self, a: int, b: int) -> None:
        """A worker cannot read an adapter that another one has read."""
        registry = self.world.core.adapters
        served = {card.name for card in registry.cards}
        loads = [
            (worker, index)
            for worker in self.world.workers.values()
            for index, frame in enumerate(worker.inbox)
            if isinstance(frame, LoadAdapter) and (known := registry.all.get(frame.adapter)) and known.name in served
        ]
        if (found := pick(loads, a)) is not None:
            worker, index = found
            worker.inbox[index] = msgspec.structs.replace(worker.inbox[index], path=f"/{BROKEN}")

    def blink(self, a: int, b: int) -> None:
        member = pick([*self.world.workers, *self.world.detokenizers, *self.world.gateways], a)
        if member is not None:
            self.world.blink(member)

    def lose_text(self, a: int, b: int) -> None:
        detokenizer = pick(list(self.world.detokenizers.values()), a)
        gateway = pick(list(self.world.gateways.values()), b)
        if detokenizer and gateway:
            self.world.lose_text(detokenizer, gateway)

    def recover(self, a: int, b: int) -> None:
        gateway = pick(list(self.world.gateways.values()), a)
        if gateway:
            self.world.recover(gateway)

    def operate(self, a: int, b: int) -> None:
        """An operator pauses the scheduler, puts it to sleep or resets its cache, and usually resumes it soon."""
        off, on = (
            (ControlVerb.PAUSE, ControlVerb.RESUME),
            (ControlVerb.SLEEP, ControlVerb.WAKE_UP),
            (ControlVerb.RESET_PREFIX_CACHE, ControlVerb.STATUS),
        )[a % 3]
        self._tell(off, level=1 + b % 2, drain=b % 3 == 0, clear_cache=b % 5 > 1)
        if off is ControlVerb.SLEEP and b % 4 == 0:
            self._tell(ControlVerb.WAKE_UP, tags=[list(MemoryTag)[b // 4 % 2]])
        for worker in list(self.world.workers.values()):
            for _ in range(b % 4):
                self.world.work(worker)
        if b % 7:
            self._tell(on)

    def _tell(self, verb: ControlVerb, **more: object) -> None:
        gateway = pick(list(self.world.gateways.values()), 0) or self.world.add_gateway()
        self.num_told += 1
        self.world.tell(gateway.incarnation, Control(f"{self.num_told}", verb, **more))

    def wait(self, a: int, b: int) -> None:
        self.world.now += a / 200
        self.world.turn()

    def _open(self, a: int) -> list[tuple[FakeGateway, str]]:
        """One open request, or None."""
        found = [(g, r) for g in self.world.gateways.values() for r, j in g.journals.items() if j.open()]
        found += [(g, r) for g in self.world.gateways.values() for r, j in g.pools.items() if j.is_open()]
        one = pick(found, a)
        return [one] if one else []


def pick(things: Sequence[T], a: int) -> T | None:
    return things[a % len(things)] if things else None

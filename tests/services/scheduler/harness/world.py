"""A scheduler core with everything around it faked, and the invariants that must hold after every step."""

import itertools
import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from zlib import crc32

import msgspec
from fake_links import FakeLinks

from blockyard.services.gpu_worker.loading.sleep import SleepingRunner
from blockyard.services.gpu_worker.mock.batch import Pattern
from blockyard.services.gpu_worker.mock.runner import MockRunner
from blockyard.services.gpu_worker.service import Worker
from blockyard.services.scheduler.batch.worker_groups import BatchLimits, WorkerGroups
from blockyard.services.scheduler.core import Scheduler, SchedulerSettings
from blockyard.services.scheduler.lifecycle.lifecycle import Lifecycle
from blockyard.services.scheduler.outbox import Outgoing
from blockyard.shared.block_hashes import block_hashes, root_hash, split_hashes
from blockyard.shared.config.services.lora import AdapterSettings, AdapterSource
from blockyard.shared.messages import (
    Attached,
    Beam,
    Broken,
    ExtraKey,
    Frame,
    Generate,
    Geometry,
    KVRole,
    Member,
    PathLost,
    Role,
    Sampling,
    SchedulerIn,
    StepPlan,
    StepResult,
    TokenBatch,
    TokenStep,
)
from blockyard.shared.token_ids import virtual_ids

from . import fake_transfers
from .beam_reference import known_prompt
from .fake_pools import PoolJournal, card_of, pool_frame
from .fake_transfers import FakeTransfers
from .fake_worker import SCHEDULER, FailingKV, FakeWorker, WaitingRunner
from .fakes import FakeDetokenizer, FakeGateway, Journal, ids_bytes
from .invariants import EOS, check, check_group, check_tokens
from .shape import Shape

SCOPE = "m|main"
STEP_S = 0.001  # seconds of a step, and of each choice in it


class World:
    def __init__(
        self,
        shape: Shape,
        stops: Callable[[TokenStep], bool] = lambda step: False,
        adapters: AdapterSettings | None = None,
    ) -> None:
        """adapters: by default as many as the shape says."""
        self.shape, self.stops = shape, stops
        self.now = 0.0
        self.num_steps = 0  # plans that were answered
        self.num_copies = 0
        self.num_waiting_rows = 0  # rows of decode batches without a token
        self.num_turns = 0  # steps; the invariants are checked after each
        self.pattern = Pattern(100, 900, shape.eos_every)
        self.core = Scheduler(
            SCHEDULER,
            SchedulerSettings(
                names=["m"],
                root="",
                batch=BatchLimits(
                    shape.max_num_seqs,
                    shape.max_num_batched_tokens,
                    shape.depth,
                    late=True,
                    watermark=shape.watermark,
                ),
                reserve_whole_prompts=shape.reserve_whole_prompts,
                max_queue_len=shape.max_queue_len,
                max_queue_tokens=shape.max_queue_tokens,
                max_queue_delay_s=shape.max_queue_delay_s,
                partial_prefills=replace(shape.partial_prefills, whole_prompts=shape.whole_prompts),
                delay_factor=shape.delay_factor,
                policy=shape.policy,
                may_sleep=shape.may_sleep,
                prefix_caching=shape.prefix_caching,
                block_scope=SCOPE,
                decode_prefill_tokens=shape.decode_prefill_tokens,
                kv_lease_s=shape.kv_lease_s,
                load_failure_policy=shape.load_failure_policy,
                adapters=adapters
                or AdapterSettings(
                    sources=[AdapterSource(name=f"a{i}", path=f"/{i}") for i in range(shape.num_adapters)]
                    + [
                        AdapterSource(name=f"p{i}", path=f"/p{i}", is_prompt=True)
                        for i in range(shape.num_prompt_adapters)
                    ]
                ),
            ),
            created=0,
            random_bytes=random.Random(0).randbytes,
        )
        self.gateways: dict[int, FakeGateway] = {}
        self.workers: dict[int, FakeWorker] = {}
        self.transfers: dict[int, FakeTransfers] = {}  # by worker
        self.num_workers = 0  # ever
        self.detokenizers: dict[int, FakeDetokenizer] = {}
        self.sent: list[Outgoing] = []  # all frames sent, for scenarios to inspect
        self.done: list[Journal] = []  # journals of gateways that are gone
        self.done_pools: list[PoolJournal] = []
        self._incarnations = itertools.count(2)

    # --- parts of the scheduler, for scenarios that look at them or act in them

    @property
    def groups(self) -> WorkerGroups:
        return self.core.worker_groups

    @property
    def lifecycle(self) -> Lifecycle:
        return self.core.lifecycle

    # --- members

    def add_gateway(self) -> FakeGateway:
        gateway = FakeGateway(next(self._incarnations))
        self.gateways[gateway.incarnation] = gateway
        self._present(gateway.incarnation, Role.API_GATEWAY)
        return gateway

    def add_worker(self, role: KVRole | None = None, layout: str = "layout") -> FakeWorker:
        """`role`: by default the next of the shape."""
        if role is None:
            role = self.shape.roles[self.num_workers % len(self.shape.roles)]
        self.num_workers += 1
        incarnation = next(self._incarnations)
        s = self.shape
        geometry = Geometry(
            0 if s.pooling == "encoder" else s.num_blocks,
            s.block_size,
            s.max_model_len,
            1000,
            [EOS],
            s.max_num_seqs,
            max(s.max_num_batched_tokens, s.max_model_len) if s.pooling == "encoder" else s.max_num_batched_tokens,
            num_host_blocks=s.num_host_blocks,
            window=s.window,
            kv_role=role,
            kv_layout=layout,
            kv_generation=incarnation,
            kv_endpoint=b"%d" % incarnation,
            pooling=card_of(s.pooling, s.max_model_len),
            num_adapter_places=s.num_adapter_places,
            num_host_adapters=max(s.num_host_adapters, s.num_adapter_places),
            num_prompt_adapters=8 if s.num_prompt_adapters else 0,
            num_stages=1
            if s.pooling or s.num_adapters or s.num_prompt_adapters
            else s.num_stages,  # they serve neither
            balanced_context=s.balanced_context if s.num_stages > 1 else 0,
        )
        links = FakeLinks(Member("gpu_worker", Role.GPU_WORKER, incarnation, "", ready=True))
        waits = (s.late_masks or s.host_waits) and s.pooling != "encoder"  # nothing of it is sampled
        runner = (
            WaitingRunner(geometry, self.pattern, s.late_masks, s.host_waits)
            if waits
            else MockRunner(geometry, self.pattern, 0.0)
        )
        if s.failing:
            runner.block_hashes = FailingKV(s.block_size)
        sleeper = SleepingRunner(lambda: runner, lambda: 0)
        self.transfers[incarnation] = FakeTransfers(incarnation)
        worker = FakeWorker(incarnation, links, Worker(links, sleeper), sleeper, runner, self.transfers)
        self.workers[incarnation] = worker
        self._present(incarnation, Role.GPU_WORKER)
        return worker

    def add_detokenizer(self) -> FakeDetokenizer:
        detokenizer = FakeDetokenizer(next(self._incarnations), self.stops)
        self.detokenizers[detokenizer.incarnation] = detokenizer
        self._present(detokenizer.incarnation, Role.DETOKENIZER)
        return detokenizer

    def kill(self, incarnation: int) -> None:
        """The member and all on its links vanish; gateways hear of a detokenizer's end from the registry."""
        if self.workers.pop(incarnation, None) is not None:
            del self.transfers[incarnation]
            fake_transfers.lose_worker(self.transfers, incarnation)
        self.detokenizers.pop(incarnation, None)
        gateway = self.gateways.pop(incarnation, None)
        if gateway is not None:
            self.done += gateway.journals.values()
            self.done_pools += gateway.pools.values()
            for pool in gateway.pools.values():
                pool.cancelled = True
            for journal in gateway.journals.values():
                journal.cancelled = True
        self.core.on_member_lost(incarnation)
        self.turn()
        for other in self.gateways.values():
            for request_id in other.through(incarnation):
                self.tell(other.incarnation, other.again(request_id))

    def break_down(self, incarnation: int, detail: str = "CUDA error") -> None:
        """A worker's device fails: it reports the error and is lost with all plans in flight."""
        self.core.on_message(incarnation, Broken(detail), self.now)
        self.kill(incarnation)

    def blink(self, incarnation: int) -> None:
        """A member's link breaks and comes back: frames on the link are lost, the member is not.

        Only the scheduler tells gateways of it. A gateway leaves the membership list and returns, as after a stall.
        """
        worker, detokenizer = self.workers.get(incarnation), self.detokenizers.get(incarnation)
        if worker is not None:
            worker.inbox.clear()
            self.transfers[incarnation].notices.clear()
            role = Role.GPU_WORKER
        elif detokenizer is not None:
            detokenizer.inbox.clear()
            detokenizer.lost_frames = True
            role = Role.DETOKENIZER
        else:
            role = Role.API_GATEWAY
            for other in self.detokenizers.values():
                other.forget(incarnation)
        self.core.on_member_lost(incarnation)
        self.turn()
        self._present(incarnation, role)

    def lose_text(self, detokenizer: FakeDetokenizer, gateway: FakeGateway) -> None:
        """A detokenizer cannot send to a gateway, and reports it."""
        detokenizer.forget(gateway.incarnation)
        self.tell(detokenizer.incarnation, PathLost(gateway.incarnation))

    def recover(self, gateway: FakeGateway) -> None:
        """A gateway sends the requests again that were reported as lost."""
        for request_id in gateway.take_lost():
            self.tell(gateway.incarnation, gateway.again(request_id))

    def _present(self, incarnation: int, role: Role) -> None:
        self.core.on_member(Member(role.value, role, incarnation, "", ready=True), self.now)
        self.turn()

    # --- events

    def tell(self, peer: int, frame: SchedulerIn) -> None:
        self.core.on_message(peer, frame, self.now)
        self.turn()

    def submit(
        self,
        gateway: FakeGateway,
        request_id: str,
        num_prompt: int,
        n: int = 1,
        prompt: list[int] | None = None,
        salt: str = "",
        tenant: str = "",
        user: str = "",
        priority: int = 0,
        beam: Beam | None = None,
        *,
        extra_keys: Sequence[ExtraKey] = (),
        batch_line: bool = False,
        adapter: str = "",
        prompt_adapter: str = "",
        kv_transfer_params: bytes = b"",
        **sampling: object,
    ) -> Generate:
        """Every other request carries its block hashes. `prompt` replaces the usual one of this length."""
        sampling.setdefault("max_tokens", 8)
        prompt = prompt or [(i * 7 + num_prompt) % 50 for i in range(num_prompt)]
        named = len(gateway.journals) % 2
        found = self.core.adapters.named(adapter)
        digest = b"" if found is None else found.digest
        of_prompt = self.core.adapters.named(prompt_adapter)
        prompt_digest = b"" if of_prompt is None else of_prompt.digest
        root = root_hash(SCOPE, cache_salt=salt, adapter=digest + prompt_digest)
        virtual = virtual_ids(0 if of_prompt is None else of_prompt.num_virtual_tokens)
        names = block_hashes(root, virtual + ids_bytes(prompt), self.shape.block_size, extra_keys)
        frame = gateway.new(
            request_id,
            prompt,
            Sampling(**sampling),
            n,
            names if named else b"",
            cache_salt=salt,
            tenant=tenant,
            user=user,
            priority=priority,
            beam=beam,
            extra_keys=list(extra_keys),
            batch_line=batch_line,
            adapter=adapter,
            adapter_digest=digest,
            prompt_adapter=prompt_adapter,
            prompt_adapter_digest=prompt_digest,
            kv_transfer_params=kv_transfer_params,
        )
        self.tell(gateway.incarnation, frame)
        return frame

    def pool(self, gateway: FakeGateway, name: str, prompts: list[list[int]], **more: object) -> PoolJournal:
        """A request for the vectors of prompts."""
        listed = dict(enumerate(prompts))
        journal = gateway.pools[name] = PoolJournal(listed, pool_frame(name, listed, **more))
        self.tell(gateway.incarnation, journal.frame)
        return journal

    def sampling(self, **sampling: object) -> Sampling:
        return Sampling(**sampling)

    def work(self, worker: FakeWorker, turn: bool = True) -> None:
        """Without `turn` the scheduler receives more frames before its next step."""
        for answer in worker.work():
            if isinstance(answer, Attached):
                self.check_names(worker)
            heard = self._timed(answer) if isinstance(answer, StepResult) else answer
            self._count_waiting_rows(worker, answer)
            self.core.on_message(worker.incarnation, heard, self.now)
            if turn:
                self.turn()

    def _count_waiting_rows(self, worker: FakeWorker, answer: Frame) -> None:
        group = self.core.groups.get(worker.incarnation)
        runner = worker.mock
        if isinstance(answer, StepResult) and group and group.in_flight and isinstance(runner, WaitingRunner):
            rows = {slot for rows in group.in_flight[0].rows for slot in rows.slots}
            self.num_waiting_rows += len(rows & runner.waiting_slots)

    def _timed(self, answer: StepResult) -> StepResult:
        """Gives each step the same time in every run. If the pacer uses the clock, the clock advances too."""
        self.num_steps += 1
        step_s = STEP_S * (1 + len(answer.slots) + len(answer.token_ids) // 4)
        if self.shape.depth is None:
            ends = self.now + step_s
            while (at := self.core.wake_at()) is not None and at < ends:
                self.now = max(self.now, at)
                self.turn()
            self.now = ends
        return msgspec.structs.replace(answer, step_s=step_s, stamp_s=self.now)

    def move(self, worker: int, count: int = 1 << 30, fails: bool = False) -> None:
        """A worker sends blocks to others. With `fails` the last of them is broken on the way."""
        kvs = {incarnation: one.mock.block_hashes for incarnation, one in self.workers.items()}
        fake_transfers.move(self.transfers, kvs, worker, count, fails)

    def notify(self, worker: int, is_doubled: bool = False) -> None:
        """The scheduler hears the next notice of a worker about its transfers."""
        notice = self.transfers[worker].notices.popleft()
        for _ in range(1 + is_doubled):
            self.tell(worker, notice)

    def detokenize(self, detokenizer: FakeDetokenizer) -> None:
        for stop in detokenizer.work(self._read):
            self.tell(detokenizer.incarnation, stop)

    def turn(self) -> None:
        for outgoing in self.core.step(self.now):
            self.sent.append(outgoing)
            to, frame = outgoing.to, outgoing.frame
            if to in self.workers:
                self.workers[to].sent(frame)
                self.num_copies += len(frame.copies) if isinstance(frame, StepPlan) else 0
            elif to in self.detokenizers:
                assert isinstance(frame, TokenBatch)
                self.detokenizers[to].inbox.append(frame)
            elif to in self.gateways:
                self.gateways[to].take(frame)
        self.num_turns += 1
        check(self.core, self.num_turns)
        self._check_places()

    def _check_places(self) -> None:
        """Every sequence that runs has its own adapter, once the plans that are sent have run."""
        for incarnation, group in self.core.groups.items():
            for running in group.running if self.shape.num_adapters or self.shape.num_prompt_adapters else ():
                request = running.sequence.request
                if request.prompt_adapter is not None and incarnation in self.workers:
                    assert group.prompts.can_start(request.prompt_adapter), "the worker has no such adapter"
                adapter = request.adapter
                assert (running.adapter_place is None) == (adapter is None)
                if adapter is not None and incarnation in self.workers:
                    assert self.workers[incarnation].places[running.adapter_place] == adapter

    def settle(self, max_steps: int = 100_000) -> None:
        """Runs all members until there is nothing left to do."""
        for _ in range(max_steps):
            workers = [w for w in self.workers.values() if w.busy()]
            detokenizers = [d for d in self.detokenizers.values() if d.inbox]
            gateways = [g for g in self.gateways.values() if g.lost]
            moving = [w for w, one in self.transfers.items() if one.outgoing]
            noticed = [w for w, one in self.transfers.items() if one.notices]
            if not workers and not detokenizers and not gateways and not moving and not noticed:
                if not self.core.ledger.transfers:
                    return
                self.now += self.shape.kv_lease_s + 1.0
                self.turn()
            for incarnation in moving:
                self.move(incarnation)
            for incarnation in noticed:
                self.notify(incarnation)
            for gateway in gateways:
                self.recover(gateway)
            for worker in workers:
                self.work(worker)
            for detokenizer in detokenizers:
                self.detokenize(detokenizer)
        raise AssertionError(f"not settled after {max_steps} steps")

    def _read(self, gateway: int, step: TokenStep) -> None:
        if gateway in self.gateways:
            self.gateways[gateway].read(step)

    # --- invariants at the end

    def check_outputs(self) -> None:
        """Every choice that was not cancelled or refused has one end, and the tokens that belong to it."""
        journals = [j for g in self.gateways.values() for j in g.journals.values()]
        for journal in journals + self.done:
            assert not journal.open(), f"{journal.frame.request_id} never ended"
            check_tokens(journal, self.pattern, self.shape.limit)
        for pool in [p for g in self.gateways.values() for p in g.pools.values()] + self.done_pools:
            pool.check_ended(self.shape.limit)

    def check_names(self, worker: FakeWorker) -> None:
        """The block hashes that a worker reports match the tokens in the journals."""
        kv, size = worker.runner.block_hashes, self.shape.block_size
        states: dict[bytes, int] = {}
        for journal in [j for g in self.gateways.values() for j in g.journals.values()] + self.done:
            frame = journal.frame
            digests = frame.adapter_digest + frame.prompt_adapter_digest
            root = root_hash(SCOPE, cache_salt=frame.cache_salt, adapter=digests)
            for out in journal.outputs.values():
                ids = array("I", known_prompt(frame) + out.ids)
                names = split_hashes(block_hashes(root, ids.tobytes(), size, journal.frame.extra_keys))
                states |= {name: crc32(ids[: size * end]) for end, name in enumerate(names, 1)}
        for block, name in kv.hashes.items():
            held = kv.state(block)
            assert states.get(name, held) == held, f"block {block} does not hold what its name says"
        for block, name, held in kv.host_states():
            assert states.get(name, held) == held, f"host block {block} is not what its name says"

    def check_idle(self) -> None:
        stats = self.core.stats()
        assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
        assert not self.core.lifecycle.requests and not self.core.lifecycle.pools
        assert (stats.arriving, stats.transfers_open, stats.blocks_quarantined) == (0, 0, 0)
        for group in self.core.groups.values():
            check_group(self.core, group)
            assert group.kv_cache.blocks.num_free == group.kv_cache.blocks.num_ids
            assert group.slots.num_free == group.slots.num_ids
        for worker in self.workers.values():
            self.check_names(worker)
        for text_outbox in self.core.streams.text_outboxes.values():
            assert text_outbox.num_streams == 0
        for detokenizer in self.detokenizers.values():
            assert not detokenizer.streams or detokenizer.lost_frames, "a detokenizer's stream was never closed"

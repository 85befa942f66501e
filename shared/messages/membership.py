"""Members <-> message bus: the membership list, with each member's role, state and counters."""

import msgspec

from blockyard.shared.messages.adapters import AdapterCard
from blockyard.shared.messages.base import Frame, FrameStruct, Role
from blockyard.shared.messages.kv_transfer import KVRole
from blockyard.shared.messages.model_settings import ModelSettings
from blockyard.shared.messages.pooling import PoolingCard

# Upper limits of the histogram of tokens per step; the last bucket has no limit.
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
# Upper limits, in seconds, of the histogram of the time from the first to the second token of a handed-over sequence.
SECOND_TOKEN_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
# Upper limits, in seconds, of the histogram of the time from the start of a constrained sequence to its first mask.
FIRST_MASK_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class ModelCard(FrameStruct, frozen=True):
    """The model as a scheduler settled it with its workers. Gateways validate requests against it."""

    names: list[str]  # served names, the first is echoed in answers
    root: str  # path or hub name of the weights
    max_model_len: int  # tokens, prompt plus output
    vocab_size: int
    created: int  # seconds since the epoch
    eos_token_ids: list[int] = []
    settings: ModelSettings = ModelSettings()
    pooling: PoolingCard | None = None  # None: the model generates text
    adapters: list[AdapterCard] = []  # that requests may name as their model
    adapter: AdapterCard | None = None  # a LoRA adapter that one request names; never on a scheduler's own card
    prompt_adapter: AdapterCard | None = None  # ... and a prompt adapter
    unloaded: list[str] = []  # names of adapters that operators have unloaded, once no request uses them any more

    @property
    def answer_name(self) -> str:
        return self.names[0] if self.named_adapter is None else self.named_adapter.name

    @property
    def named_adapter(self) -> AdapterCard | None:
        """The adapter that a request names as its model."""
        return self.adapter or self.prompt_adapter

    def with_adapter(self, adapter: AdapterCard) -> "ModelCard":
        """The card of a request that names an adapter. Virtual tokens take room of its context; added ones have ids."""
        if not adapter.is_prompt:
            return msgspec.structs.replace(
                self,
                adapter=adapter,
                max_model_len=adapter.max_len or self.max_model_len,
                vocab_size=self.vocab_size + adapter.num_added_tokens,
            )
        length = self.max_model_len - adapter.num_virtual_tokens
        return msgspec.structs.replace(self, prompt_adapter=adapter, max_model_len=length)


class RefusalCount(FrameStruct, frozen=True):
    reason: str
    total: int


class NamedCount(FrameStruct, frozen=True):
    name: str
    total: int


class AdapterUse(FrameStruct, frozen=True):
    """The LoRA adapters of one scheduler's requests."""

    num_places: int  # adapters that a step may use, of the worker that has the fewest
    running: list[str]  # names of those with sequences in a batch
    waiting: list[str]  # of those with sequences that wait


class TenantShare(FrameStruct, frozen=True):
    """A tenant's use of one scheduler."""

    tenant: str
    running: int  # sequences
    waiting: int
    served: int  # weighted tokens, as the fair policy compares them


class RankStats(FrameStruct, frozen=True):
    """One process of a worker with several ranks."""

    rank: int  # 0: the leader, which is the member itself
    pid: int
    rss_bytes: int
    silent_s: float = 0.0  # since its last sign of life


class RankAddress(FrameStruct, frozen=True):
    """Where ranks that a leader has not started itself join its group."""

    group: str  # name: ranks look for it
    signs: str  # endpoints
    commands: str


class Stats(FrameStruct, frozen=True):
    """Counters since start, and gauges. Fields that do not apply to a role stay 0."""

    running: int = 0  # sequences in the batch; open streams of gateways and detokenizers
    waiting: int = 0
    requests_total: int = 0
    prompt_tokens_total: int = 0
    output_tokens_total: int = 0
    preemptions_total: int = 0
    blocks_used: int = 0
    blocks_total: int = 0
    steps_total: int = 0
    rss_bytes: int = 0
    malformed_total: int = 0  # frames that did not decode
    prefix_queries_total: int = 0  # tokens looked up in the prefix cache
    prefix_hits_total: int = 0  # tokens found there
    host_blocks_used: int = 0  # KV blocks in host memory
    host_blocks_total: int = 0
    blocks_saved_total: int = 0  # from the device to host memory
    blocks_fetched_total: int = 0  # from host memory to the device
    waiting_tokens: int = 0
    wait_s: float = 0.0  # estimated time until all waiting requests are served, by the measured rate
    displaced_total: int = 0  # preemptions in favour of a request that the policy puts first
    refused: list[RefusalCount] = []
    tenants: list[TenantShare] = []  # under the fair policy: the tenants that were served most
    active: int = 0  # HTTP requests in progress, of gateways
    step_sizes: list[int] = []  # number of steps by their prompt plus generated tokens, in the buckets of STEP_TOKENS
    step_tokens_total: int = 0  # sum of the same tokens
    arriving: int = 0  # sequences whose KV blocks come from another worker; also counted in `waiting`
    transfers_open: int = 0  # of KV blocks between workers, until both workers have ended them
    transfers_landed_total: int = 0
    transfers_aborted_total: int = 0
    blocks_quarantined: int = 0  # KV blocks of aborted transfers that a worker may still use
    transfer_blocks_failed_total: int = 0  # KV blocks that arrived with a wrong checksum
    transfer_notices_dropped_total: int = 0  # frames about transfers that are unknown, or that ended
    second_token_counts: list[int] = []  # sequences that were handed over, in the buckets of SECOND_TOKEN_S
    second_token_us_total: int = 0  # sum of the same times, in microseconds
    transfer_bytes: list[NamedCount] = []  # bytes of KV blocks that this worker has sent, by connector
    transfer_frames_dropped: list[NamedCount] = []  # frames of other workers that this one has refused, by reason
    sends_to: list[int] = []  # incarnations of workers that it has sent KV blocks to since its last counters
    transfer_audit_differences_total: int = 0  # transfers that a worker knew otherwise than the scheduler
    masks_total: int = 0  # masks of structured output that this worker has applied
    mask_waits_total: int = 0  # sequences that a step left without a token because their mask was late
    matcher_restarts_total: int = 0  # processes that make masks and were started again
    first_mask_counts: list[int] = []  # constrained sequences, in the buckets of FIRST_MASK_S
    first_mask_us_total: int = 0  # sum of the same times, in microseconds
    expert_samples_total: int = 0  # steps of a mixture of experts whose choices this worker has counted
    experts_hit_total: int = 0  # experts, of all layers, that those steps chose at least once
    experts_hit_if_even_total: int = 0  # as many would have been chosen on average if all were chosen equally often
    expert_loads: list[float] = []  # of each layer with experts: tokens of the most loaded over the mean, lately
    prefill_steps_total: int = 0  # steps of a worker in which a sequence computed several tokens of its prompt
    prefill_step_us_total: int = 0  # time of these steps, in microseconds
    prefill_launch_us_total: int = 0  # time that the worker's host took to launch them, in microseconds
    decode_step_us_total: int = 0  # of the other steps
    decode_launch_us_total: int = 0
    adapter_use: AdapterUse | None = None  # None: the workers serve no adapters
    ranks: list[RankStats] = []  # of a worker with several ranks: all of them
    expert_rank_loads: list[float] = []  # of each layer with experts that move: of the fullest rank over the mean
    experts_moved_total: int = 0  # to another rank


class Member(FrameStruct, frozen=True):
    """One process of the ring in the membership list."""

    name: str
    role: Role
    incarnation: int
    endpoint: str  # where its ROUTER is bound; empty for a member that only listens
    model: str = ""  # the first served name; empty if the member serves any model
    ready: bool = False
    phase: str = "starting"  # current phase of its start-up, for the start-up report
    progress: float = 0.0  # of the phase, 0 to 1
    notes: list[str] = []  # settled values in words, for the start-up report
    card: ModelCard | None = None  # schedulers only, once settled
    stats: Stats = Stats()
    kv_role: KVRole | None = None  # workers with KV transfers only
    ranks: RankAddress | None = None  # workers with ranks on several hosts only


class Announce(Frame, frozen=True):
    """A member's heartbeat with its current state. It also adds a member that is not on the list."""

    member: Member


class Leave(Frame, frozen=True):
    """A member ends on purpose."""

    incarnation: int


class LinkLost(Frame, frozen=True):
    """A peer's link closed and did not come back in time: remove the member from the list."""

    incarnation: int


class Members(Frame, frozen=True):
    """The membership list. Until it is settled (4 s after a registry's start) a missing member is not a lost one."""

    settled: bool
    members: list[Member]


class MembersRequest(Frame, frozen=True, tag="AskMembers"):
    """Asks for the list once, from a process that is not a member."""

"""Scheduler <-> GPU worker: attachment, the plan of each step, and its result."""

import msgspec

from blockyard.shared.messages.adapters import AdapterPlaced
from blockyard.shared.messages.base import FinishReason, Frame, FrameStruct
from blockyard.shared.messages.kv_transfer import KVRole, KVSend
from blockyard.shared.messages.pooling import PackedStep, PackedVectors, PooledStart, PoolingCard
from blockyard.shared.messages.requests import Sampling
from blockyard.shared.messages.streams import TokenLogprobs


class Attach(Frame, frozen=True):
    """Takes a worker over: it ends its current plan, drops queued plans and all slots, and keeps its KV."""

    scheduler: int  # incarnation; from now on the worker accepts plans of this one only
    num_slots: int  # slots are 0 to num_slots - 1
    forget: bool = False  # the contents of blocks are invalid, on the device and in host memory
    number: int = 0  # of this demand; repeated in its answer


class Geometry(FrameStruct, frozen=True):
    """The sizes a worker group settled at start-up."""

    num_blocks: int
    block_size: int  # tokens
    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    max_num_seqs: int
    max_num_batched_tokens: int
    num_host_blocks: int = 0  # in host memory, of the same size
    window: int | None = None  # largest number of keys a token attends to, itself included; None: all, in some layer
    step_s: float = 0.0  # measured time of a decode step of one sequence; 0: not measured
    kv_role: KVRole = KVRole.BOTH
    kv_layout: str = ""  # "layers 32; KV heads 8; ...": groups exchange blocks if theirs are equal; empty: with none
    kv_generation: int = 0  # of the KV memory: it rises whenever that is another one
    kv_endpoint: bytes = b""  # how other workers reach the KV memory; opaque
    pooling: PoolingCard | None = None  # None: the model generates text. Without KV, `num_blocks` is 0.
    num_adapter_places: int = 0  # adapters on the device at a time; 0: the worker serves none
    num_host_adapters: int = 0  # in its host memory
    num_stages: int = 1  # pipeline stages: so many plans can be computed at a time, of other sequences each
    # with stages: tokens before a token of a prompt of which attention costs as much as the token's matrix products; 0:
    # unknown, or no layer attends to all
    balanced_context: int = 0
    num_prompt_adapters: int = 0  # that it holds at a time; 0: it serves none
    base_len: int = 0  # longest sequence without an adapter for longer contexts; 0: `max_model_len`
    num_extra_tokens: int = 0  # that an adapter may add behind `vocab_size`, at most

    @property
    def vector_size(self) -> int:
        """Numbers of a result, or of each row of it; 0: the model generates text."""
        return 0 if self.pooling is None else self.pooling.width


class Attached(Frame, frozen=True):
    scheduler: int
    geometry: Geometry
    block_ids: list[int] = []  # full blocks of completed plans ...
    block_hashes: bytes = b""  # ... and their hashes, 16 bytes each
    host_block_ids: list[int] = []  # full blocks in host memory ...
    host_block_hashes: bytes = b""  # ... and their hashes
    open_transfers: list[int] = []  # transfers with blocks that may still be read or written ...
    open_transfer_blocks: list[list[int]] = []  # ... and the blocks of each on this worker
    number: int = 0  # of the Attach


class Fenced(Frame, frozen=True):
    """The worker belongs to another scheduler: the receiver ends."""


class OutOfStep(Frame, frozen=True):
    """worker -> scheduler: a plan did not decode or was out of order; slots are gone, attach again."""

    expected: int  # plan number


class SlotStart(FrameStruct, frozen=True):
    """A sequence enters a slot with all its ids."""

    slot: int
    token_ids: bytes  # prompt and the outputs known so far
    num_prompt_tokens: int
    num_computed: int  # leading tokens with KV in `blocks` already
    blocks: list[int]
    sampling: Sampling
    choice: int
    prompt_logprobs_from: int = 0  # earlier positions were delivered already
    has_text: bool = True  # False: no token is sampled, and the result is a vector
    pooled: PooledStart | None = None  # None with `has_text` False: as the model's settings say
    adapter_place: int | None = None  # of the adapter that its tokens are computed with; None: with none
    prompt_adapter: int | None = None  # whose vectors are the input of the first tokens; None: each token is its id
    num_virtual_tokens: int = 0  # leading tokens of the prompt that are no tokens of the client
    num_added_tokens: int = 0  # ids behind the vocabulary, which the adapter adds


class SlotBlocks(FrameStruct, frozen=True):
    """Blocks appended to a slot's block table."""

    slot: int
    blocks: list[int]


class SlotRun(FrameStruct, frozen=True):
    """A slot that runs in this plan. It has no position or length: only the device knows them."""

    slot: int
    max_tokens: int  # most tokens that this step computes KV of


class FullBlock(FrameStruct, frozen=True):
    """The block is full once this plan completed."""

    block: int
    block_hash: bytes


class BlockSave(FrameStruct, frozen=True):
    """Copies a device block to host memory, before this plan writes to any block."""

    block: int
    host: int
    block_hash: bytes


class BlockFetch(FrameStruct, frozen=True):
    """Copies a block of host memory to the device, after the plan's saves and before the plan reads any block."""

    host: int
    block: int


class BlockCopy(FrameStruct, frozen=True):
    """Copies a whole block to another block, after the plan's fetches and before its runs.

    Copies of one plan are parallel: a worker may read any source before or after it writes any destination. So no
    block is both a source and a destination in one plan, none is a destination twice, and a source holds the result of
    earlier plans or of this plan's fetches.
    """

    src: int
    dst: int


class StepPlan(Frame, frozen=True):
    """Changes since the last plan, then the slots that run. Applied in the order of the fields, except that
    copies of blocks come after `ends` and before `starts`."""

    scheduler: int
    number: int  # the last plan's plus one; 1 after Attach
    ends: list[int]  # slots; they write nothing any more
    starts: list[SlotStart]
    blocks: list[SlotBlocks]
    runs: list[SlotRun]
    full_blocks: list[FullBlock] = []
    saves: list[BlockSave] = []
    fetches: list[BlockFetch] = []
    copies: list[BlockCopy] = []
    sends: list[KVSend] = []
    adapters: list[AdapterPlaced] = []  # before the plan's starts
    packed: PackedStep | None = None  # of a model without KV, in place of all that has slots


class SlotResult(FrameStruct, frozen=True):
    """0 to m tokens of one slot. A finished slot stays silent until its end is planned."""

    slot: int
    token_ids: list[int]
    num_computed: int  # tokens with KV written so far
    finish: FinishReason | None = None
    stop_token: int | None = None
    logprobs: list[TokenLogprobs] = []
    first_prompt: int = 0
    prompt_logprobs: list[TokenLogprobs] = []
    detail: str = ""
    status: int = 500  # as in TokenStep
    vector: bytes = b""  # float32: the result of a slot without text, which is finished by it
    width: int = 0  # of `vector`, as in VectorBlock


class StepResult(Frame, frozen=True):
    """Answers one plan, in order. Slots that ran appear; slots that had ended produce nothing."""

    number: int
    slots: list[SlotResult]
    stamp_s: float  # CLOCK_REALTIME at the step's end
    step_s: float = 0.0  # time the step took on the worker
    failed_fetches: list[int] = []  # device blocks that could not be fetched
    # One uint32 per run, in the plan's order: the sampled token of a slot that computed one token and reports nothing
    # else. NO_TOKEN for a slot that is in `slots` or produced nothing. Empty: all results are in `slots`.
    token_ids: bytes = b""
    launch_s: float = 0.0  # host time to launch the step, if the device computes meanwhile
    # One a run: the encoded TokenLogprobs of its id in `token_ids`, NO_LOGPROBS for none. Empty: none has any. They are
    # encoded once, by the worker: the scheduler passes them on.
    logprobs: list[msgspec.Raw] = []
    packed: PackedVectors | None = None  # of a packed step


class Broken(Frame, frozen=True):
    """The worker's device failed: the worker ends, and plans in flight are lost."""

    detail: str

"""Every frame that crosses a process boundary. New fields go last, with a default.

Token ids of prompts are bytes (little-endian uint32), block names bytes (16 a block): opaque to whoever
only forwards them. Incarnations are 64 random bits, compared for equality and never ordered.
"""

import enum

import msgspec

PROTOCOL_VERSION = 2  # 2: frames above `sockets.PART_BYTES` travel in parts
NO_TOKEN = 0xFFFFFFFF  # where a list of token ids has none
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # upper limits; the last bucket has none


class Role(enum.StrEnum):
    """What a member does; the values are the folder names under `services`."""

    API_GATEWAY = "api_gateway"
    TOKENIZER_POOL = "tokenizer_pool"
    SCHEDULER = "scheduler"
    GPU_WORKER = "gpu_worker"
    DETOKENIZER = "detokenizer"
    LAUNCHER = "launcher"


class FinishReason(enum.IntEnum):
    STOP = 0
    LENGTH = 1
    CANCELLED = 2  # the caller asked; never used for our own faults
    FAILED = 3  # our fault or the input's: the gateway answers with an error


class Record(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of what travels inside frames. Without fields, as `Frame`."""


class Frame(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Base of all frames. Without fields: one added here would shift every subclass's array."""


# --- membership: member <-> message_bus ---------------------------------------------------------------


class ModelCard(Record, frozen=True):
    """What a scheduler settled with its workers; gateways validate requests against it."""

    names: list[str]  # served names, the first is echoed in answers
    root: str  # path or hub name of the weights
    max_model_len: int  # tokens, prompt plus output
    vocab_size: int
    created: int  # seconds since the epoch
    eos_token_ids: list[int] = []


class Refusals(Record, frozen=True):
    reason: str
    total: int


class TenantShare(Record, frozen=True):
    """What one tenant has of a scheduler."""

    tenant: str
    running: int  # choices
    waiting: int
    served: int  # weighted tokens, as they are compared


class Stats(Record, frozen=True):
    """Counters since start and gauges, as far as they apply to a role; the rest stays 0."""

    running: int = 0  # choices in the batch; open streams at gateways and detokenizers
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
    blocks_fetched_total: int = 0  # and back
    waiting_tokens: int = 0
    wait_s: float = 0.0  # until what waits now is served, by the measured rate
    displaced_total: int = 0  # of the preemptions those for somebody whom the policy puts first
    refused: list[Refusals] = []  # by reason
    tenants: list[TenantShare] = []  # fair sharing: those that were served most
    active: int = 0  # HTTP requests in progress, of gateways
    step_sizes: list[int] = []  # steps by tokens: of prompts computed plus generated, in the buckets of STEP_TOKENS
    step_tokens_total: int = 0  # the same tokens summed


class Member(Record, frozen=True):
    """One process of the ring, as the membership list shows it."""

    name: str
    role: Role
    incarnation: int
    endpoint: str  # where its ROUTER is bound; empty for a member that only listens
    model: str = ""  # the first served name; empty where any model will do
    ready: bool = False
    phase: str = "starting"  # what it does until it is ready, for the start-up report
    progress: float = 0.0  # of the phase, 0 to 1
    notes: list[str] = []  # settled values in words, for the start-up report
    card: ModelCard | None = None  # schedulers only, once settled
    group: int = 0  # worker group
    rank: int = 0  # within the group
    stats: Stats = Stats()


class Announce(Frame, frozen=True):
    """Heartbeat and news in one: whoever the list does not hold is added by it."""

    member: Member


class Leave(Frame, frozen=True):
    """A member ends on purpose."""

    incarnation: int


class LinkLost(Frame, frozen=True):
    """A peer's link closed and did not come back in time: the member is to be taken off the list."""

    incarnation: int


class Members(Frame, frozen=True):
    """The list. Until it is settled (4 s after a registry's start) nobody may be missed from it."""

    registry: int  # incarnation
    settled: bool
    members: list[Member]


class AskMembers(Frame, frozen=True):
    """One look at the list by somebody who is no member: answered with Members once."""

    asker: str


# --- links --------------------------------------------------------------------------------------------


class Hello(Frame, frozen=True):
    """First frame of a link, both ways. A receiver that is not `to` answers, and drops all that follows."""

    version: int
    incarnation: int  # the sender's
    name: str
    to: int = 0  # incarnation meant; 0 in answers


# --- text: api_gateway <-> tokenizer_pool -------------------------------------------------------------


class Tokenize(Frame, frozen=True):
    """One prompt to ids: exactly one of `text`, `messages` and `token_ids` is set."""

    request_id: str
    model: str
    text: str | None = None
    messages: bytes | None = None  # JSON list of chat messages
    token_ids: bytes | None = None  # already ids: checked against the vocabulary, block names are added
    tools: bytes = b""  # JSON list
    template_kwargs: bytes = b""  # JSON object
    chat_template: str | None = None  # in place of the model's
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool | None = None  # None: True for text, False for messages
    bad_words: list[str] = []
    cache_salt: str = ""
    want_text: bool = False  # the rendered prompt comes back too
    want_pieces: bool = False  # each token's text comes back too
    content_format: str = ""  # of messages, as --chat-template-content-format has it; "": as that says
    max_tokens: int = 0  # a prompt that is longer for certain is rejected before it is encoded; 0: no bound


class Tokenized(Frame, frozen=True):
    request_id: str
    token_ids: bytes
    block_names: bytes  # of the full blocks
    bad_words: list[list[int]] = []
    text: str = ""
    pieces: list[str] = []


class Detokenize(Frame, frozen=True):
    request_id: str
    model: str
    token_ids: bytes


class Detokenized(Frame, frozen=True):
    request_id: str
    text: str


class TextRejected(Frame, frozen=True):
    """The input cannot be turned into ids, or ids into text: a 4xx that names the field."""

    request_id: str
    field: str
    message: str
    code: str = ""  # OpenAI's word for it, where there is one


# --- requests: api_gateway <-> scheduler --------------------------------------------------------------


class Sampling(Record, frozen=True):
    """How tokens are chosen; the worker's business, from the gateway on already validated."""

    max_tokens: int  # output tokens of one choice, over all attempts
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 is all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0  # 64 bits
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: list[int] = []  # besides the model's end-of-sequence ids
    logit_bias: list[tuple[int, float]] = []
    bad_words: list[list[int]] = []
    allowed_token_ids: list[int] = []  # empty is all
    num_logprobs: int | None = None  # candidates besides the sampled token; 0 is the sampled one alone
    num_prompt_logprobs: int | None = None


class TextOptions(Record, frozen=True):
    """How ids become text; the detokenizer's business."""

    stop: list[str] = []
    include_stop: bool = False  # the stop string, and the text of the token that ended the choice
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    tokens_as_ids: bool = False  # logprob tokens are shown as `token_id:N`
    min_tokens: int = 0  # stop strings do not count in the text of this many output tokens


class Choice(Record, frozen=True):
    """One of the `n` continuations of a prompt, with what was delivered of it before this attempt."""

    index: int
    output_ids: bytes = b""
    chars_sent: int = 0


class BeamStop(enum.IntEnum):
    """When a beam search with `width` finished hypotheses ends; the words of `early_stopping`."""

    LIKELY = 0  # false: the best live one is worse, as it is now, than the worst finished one
    FIRST = 1  # true: at once
    NEVER = 2  # "never": the best live one could not become better


class Beam(Record, frozen=True):
    """The request's choices are the best that a beam search finds, in their order."""

    width: int
    length_penalty: float = 1.0
    stop: BeamStop = BeamStop.LIKELY


class Generate(Frame, frozen=True):
    """Admit a prompt and its choices. `attempt` rises by one each time the gateway sends it again."""

    request_id: str
    attempt: int
    model: str
    prompt_ids: bytes
    block_names: bytes
    sampling: Sampling
    text: TextOptions
    choices: list[Choice]
    priority: int = 0  # lower is earlier
    tenant: str = ""
    deadline_s: float | None = None  # a duration from arrival
    adapter: str = ""
    cache_salt: str = ""
    crashes: int = 0  # worker deaths this request was part of
    user: str = ""  # divides the tenant's share
    beam: Beam | None = None


class Cancel(Frame, frozen=True):
    """Caller is gone: drop all state of this request, up to this attempt. Unknown ids are ignored."""

    request_id: str
    attempt: int


class Room(Record, frozen=True):
    """What the waiting queue still takes; gateways answer 429 by it before anything is tokenized."""

    choices: int
    tokens: int
    retry_after_s: float = 1.0  # until what waits now is served
    tenant: str | None = None  # when it is full: the one that has to give way, and so the only one ...
    user: str | None = None  # ... and its user, for whom it is; None: it is for everybody
    asleep: bool = False  # nothing is served until somebody wakes it up


class Accepted(Frame, frozen=True):
    request_id: str
    attempt: int
    detokenizer: int  # incarnation its text will come from
    room: Room


class Refused(Frame, frozen=True):
    request_id: str
    attempt: int
    status: int  # HTTP status
    field: str
    message: str
    room: Room


class RoomChanged(Frame, frozen=True):
    """From full to not full or back, to every gateway that has a link."""

    room: Room


# --- operations: api_gateway <-> scheduler <-> gpu_worker ---------------------------------------------


class Verb(enum.IntEnum):
    LOOK = 0
    RESET_PREFIX_CACHE = 1
    PAUSE = 2
    RESUME = 3
    SLEEP = 4
    WAKE_UP = 5


class Part(enum.StrEnum):
    """What a sleeping worker gets back; the words of `/wake_up?tags=`."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"


class Control(Frame, frozen=True):
    """What an operator asks of a scheduler. Doing it twice is doing it once."""

    request_id: str
    verb: Verb
    level: int = 1  # of sleep: 1 weights to host memory, 2 no weights; KV is dropped at both
    drain: bool = False  # pause: those that run end first; if not, they stand still
    clear_cache: bool = True  # pause: KV is computed again, as after a change of weights
    tags: list[Part] = []  # wake_up: only these; empty: all


class Controlled(Frame, frozen=True):
    """The answer to Control, once it is done: how things stand."""

    request_id: str
    status: int  # HTTP status
    message: str
    sleep_level: int
    paused: bool
    freed_bytes: int = 0  # by the workers that sleep now


class Sleep(Frame, frozen=True):
    """scheduler -> gpu_worker: drop plans and slots, give memory back. The next Attach wakes it up."""

    scheduler: int
    level: int


class Wake(Frame, frozen=True):
    """scheduler -> gpu_worker: takes a part of its memory again and sleeps on, answered with Slept. The next Attach
    brings the rest."""

    scheduler: int
    parts: list[Part]


class Slept(Frame, frozen=True):
    worker: int
    level: int
    freed_bytes: int


# --- tokens: scheduler -> detokenizer -> api_gateway --------------------------------------------------


class TokenLogprobs(Record, frozen=True):
    """Log-probabilities at one position: of its token, and of the likeliest candidates."""

    token_id: int
    logprob: float
    rank: int  # 1 is the likeliest
    top_ids: list[int]
    top_logprobs: list[float]


class StreamOpen(Record, frozen=True):
    """One choice's text begins, or goes on after `output_ids` and `chars_sent`, at this detokenizer."""

    request_id: str
    attempt: int
    choice: int
    gateway: int  # incarnation
    context_ids: bytes  # the prompt's last few ids: they decide leading spaces
    output_ids: bytes
    chars_sent: int
    options: TextOptions
    stream: int = 0  # what its scheduler calls it in `TokenRows`; 0: it never does


class TokenStep(Record, frozen=True):
    """Tokens one scheduler step produced for one choice, in order."""

    request_id: str
    attempt: int  # the highest attempt of an id wins, lower ones are dropped
    choice: int
    first: int  # index of token_ids[0] among the choice's output tokens
    token_ids: list[int]
    finish: FinishReason | None = None
    stop_token: int | None = None  # the stop id that ended it, None for end-of-sequence
    detail: str = ""  # human-readable cause, set only with FinishReason.FAILED
    logprobs: list[TokenLogprobs] = []  # one a token, where asked
    first_prompt: int = 0  # prompt position of prompt_logprobs[0]
    prompt_logprobs: list[TokenLogprobs] = []
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    queued_s: float | None = None  # with the first token: how long its request waited for a place in a batch


class TokenRows(Record, frozen=True):
    """One more token of each of many streams that go on: what nearly all have in nearly every step. uint32 each."""

    streams: bytes  # as they were called when they were opened
    firsts: bytes  # index of the token among its choice's output tokens
    token_ids: bytes

    def __post_init__(self) -> None:
        if not len(self.streams) == len(self.firsts) == len(self.token_ids) or len(self.streams) % 4:
            raise ValueError(f"{len(self.streams)}, {len(self.firsts)} and {len(self.token_ids)} bytes of uint32")


class TokenBatch(Frame, frozen=True):
    """All that a step has for one detokenizer, in the order opens, rows, steps, closes."""

    opens: list[StreamOpen]
    steps: list[TokenStep]
    closes: list[Cancel] = []
    stamp_s: float = 0.0  # when the worker ended the step: seconds of CLOCK_REALTIME
    rows: list[TokenRows] = []


class PathLost(Frame, frozen=True):
    """Text of open requests was lost on its way to a live gateway, which sends them again with the next attempt.

    detokenizer -> scheduler: text for the gateway `member` could not be sent. scheduler -> api_gateway: of the requests
    that it has there, lost are those whose text comes from the detokenizer `member`, or all if `member` is the gateway.
    """

    member: int  # incarnation


class StreamRef(Record, frozen=True):
    request_id: str
    attempt: int
    choice: int


class Stop(Frame, frozen=True):
    """detokenizer -> scheduler: stop strings were found; these choices need no more tokens."""

    streams: list[StreamRef]


class TextLogprobs(Record, frozen=True):
    """`TokenLogprobs` with each token's text; bytes because one token may be part of a character."""

    token_id: int
    token: bytes
    logprob: float
    rank: int
    top_ids: list[int]
    top_tokens: list[bytes]
    top_logprobs: list[float]


class TextDelta(Record, frozen=True):
    """Final text and the ids it accounts for; `text` is empty while characters are held back."""

    request_id: str
    attempt: int
    choice: int
    first: int
    token_ids: list[int]
    text: str
    finish: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop id or string that ended it
    detail: str = ""
    logprobs: list[TextLogprobs] = []
    first_prompt: int = 0
    prompt_logprobs: list[TextLogprobs] = []
    cached_tokens: int = 0
    queued_s: float | None = None  # as in `TokenStep`


class TextBatch(Frame, frozen=True):
    """All that a step has for one gateway."""

    deltas: list[TextDelta]
    stamp_s: float = 0.0


# --- steps: scheduler <-> gpu_worker ------------------------------------------------------------------


class Attach(Frame, frozen=True):
    """Take a worker: it ends the plan it is on, drops queued plans and all slots, and keeps its KV."""

    scheduler: int  # incarnation; from here on the worker obeys this one only
    num_slots: int  # slots are 0 to num_slots - 1
    depth: int  # plans that may be queued besides the running one
    forget: bool = False  # what blocks hold counts no more, on the device and in host memory


class Geometry(Record, frozen=True):
    """What a worker group settled at start-up."""

    num_blocks: int
    block_size: int  # tokens
    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    max_num_seqs: int
    max_num_batched_tokens: int
    bytes_per_block: int = 0
    num_host_blocks: int = 0  # in host memory, of the same size
    window: int | None = None  # keys that a token sees at most, itself included; None: in some layer it sees all
    step_s: float = 0.0  # measured time of a decode step of one choice; 0: nobody measured it


class Attached(Frame, frozen=True):
    worker: int  # incarnation
    scheduler: int
    geometry: Geometry
    block_ids: list[int] = []  # full blocks whose plan completed ...
    block_names: bytes = b""  # ... and their names, 16 bytes each
    host_block_ids: list[int] = []  # blocks in host memory that hold something ...
    host_block_names: bytes = b""  # ... and their names


class Fenced(Frame, frozen=True):
    """The worker obeys another scheduler: whoever gets this ends."""

    scheduler: int  # the one that was refused


class OutOfStep(Frame, frozen=True):
    """worker -> scheduler: a plan did not decode or was out of order; slots are gone, attach again."""

    worker: int
    expected: int  # plan number


class SlotStart(Record, frozen=True):
    """A choice enters a slot with all its ids."""

    slot: int
    token_ids: bytes  # prompt and the outputs known so far
    num_prompt_tokens: int
    num_computed: int  # leading tokens whose KV is in `blocks` already
    blocks: list[int]
    sampling: Sampling
    choice: int
    prompt_logprobs_from: int = 0  # positions before it were delivered already


class SlotBlocks(Record, frozen=True):
    """Blocks appended to a slot's block table."""

    slot: int
    blocks: list[int]


class SlotRun(Record, frozen=True):
    """A slot that runs in this plan. Neither position nor length: only the device knows them."""

    slot: int
    max_tokens: int  # tokens whose KV this step computes, at most


class BlockName(Record, frozen=True):
    """The block is full once this plan completed."""

    block: int
    name: bytes


class BlockSave(Record, frozen=True):
    """A block of the device is kept in host memory, before anything of this plan writes to it."""

    block: int
    host: int
    name: bytes


class BlockFetch(Record, frozen=True):
    """A block of host memory comes to the device, before anything of this plan reads it, and after its saves."""

    host: int
    block: int


class BlockCopy(Record, frozen=True):
    """Copies all that a block holds to another block, after the plan's fetches and before anything of it runs.

    Copies of one plan are parallel: a worker may read any source before or after it writes any destination. So no
    block is both a source and a destination in one plan, none is a destination twice, and a source holds what earlier
    plans wrote or what this plan's fetches bring.
    """

    src: int
    dst: int


class StepPlan(Frame, frozen=True):
    """What changed since the last plan, then who runs. Applied in the order of the fields, but copies of blocks
    come after `ends` and before `starts`."""

    scheduler: int
    number: int  # the last plan's plus one; 1 after Attach
    ends: list[int]  # slots; they write nothing any more
    starts: list[SlotStart]
    blocks: list[SlotBlocks]
    runs: list[SlotRun]
    names: list[BlockName] = []
    saves: list[BlockSave] = []
    fetches: list[BlockFetch] = []
    copies: list[BlockCopy] = []


class SlotResult(Record, frozen=True):
    """0 to m tokens of one slot. A finished slot stays silent until its end is planned."""

    slot: int
    token_ids: list[int]
    num_computed: int  # tokens whose KV is written now
    finish: FinishReason | None = None
    stop_token: int | None = None
    logprobs: list[TokenLogprobs] = []
    first_prompt: int = 0
    prompt_logprobs: list[TokenLogprobs] = []
    detail: str = ""


class StepResult(Frame, frozen=True):
    """Answers one plan, in order. Slots that ran appear; those that had ended produce nothing."""

    worker: int
    number: int
    slots: list[SlotResult]
    stamp_s: float  # CLOCK_REALTIME at the step's end
    step_s: float = 0.0  # time the step took on the worker
    failed_fetches: list[int] = []  # blocks of the device that do not hold what was to be fetched
    token_ids: bytes = b""  # uint32 a run, in the plan's order: of slots that computed one token, drew this one and
    # have nothing else to say. NO_TOKEN of others, which are in `slots` or produced nothing. Empty: all are.
    launch_s: float = 0.0  # time the host took to launch the step, where the device computes meanwhile


class Broken(Frame, frozen=True):
    """The worker's device failed: it ends, and what was in flight is lost."""

    worker: int
    detail: str


# --- metrics: api_gateway <-> api_gateway, api_gateway <-> scheduler ----------------------------------


class Scrape(Frame, frozen=True):
    request_id: str


class PastText(Record, frozen=True):
    """What a gateway that is gone had counted when it was last asked."""

    gateway: int  # incarnation
    text: str


class Scraped(Frame, frozen=True):
    request_id: str
    text: str  # Prometheus exposition format
    past: list[PastText] = []
    gone: list[Member] = []  # other members, with what they had counted


class AskStats(Frame, frozen=True):
    """What a scheduler counts, as of now: heartbeats bring it late."""

    request_id: str


class StatsTold(Frame, frozen=True):
    request_id: str
    stats: Stats


# --- what each service accepts, nothing else ----------------------------------------------------------

RegistryIn = Announce | Leave | LinkLost | AskMembers
MemberIn = Members  # from the registry, on the registry link
GatewayIn = (
    Tokenized
    | Detokenized
    | TextRejected
    | Accepted
    | Refused
    | RoomChanged
    | TextBatch
    | Scrape
    | Scraped
    | Controlled
    | PathLost
    | StatsTold
)
TokenizerIn = Tokenize | Detokenize
SchedulerIn = (
    Generate
    | Cancel
    | Stop
    | PathLost
    | Attached
    | Fenced
    | OutOfStep
    | StepResult
    | Control
    | Slept
    | Broken
    | AskStats
)
DetokenizerIn = TokenBatch
WorkerIn = Attach | StepPlan | Sleep | Wake

"""Every frame that crosses a process boundary, one module a conversation.

All names are imported from this package; pyproject.toml lets mypy and ruff accept these re-exports. New fields go last,
with a default. Token ids of prompts are bytes (little-endian uint32), and so are block hashes (16 bytes a block):
services that only forward them never decode them. Incarnations are 64 random bits, compared for equality and never
ordered. Each socket accepts one union of frames, defined here (`GatewayIn`, `SchedulerIn`, ...). Imports go from the
conversations to `base`, never back.
"""

from blockyard.shared.messages.adapters import AdapterCard, AdapterLoaded, AdapterPlaced, DropAdapter, LoadAdapter
from blockyard.shared.messages.base import (
    FAULTS,
    NO_TOKEN,
    PROTOCOL_VERSION,
    FinishReason,
    Frame,
    FrameStruct,
    Hello,
    Role,
)
from blockyard.shared.messages.controls import Control, Controlled, ControlVerb, MemoryTag, Sleep, Slept, Wake
from blockyard.shared.messages.grammars import MAX_GRAMMAR_BYTES, Grammar, GrammarEngine, GrammarKind, OutputConstraint
from blockyard.shared.messages.kv_transfer import (
    KVAbort,
    KVAudit,
    KVLanded,
    KVOpenTransfers,
    KVReceive,
    KVRole,
    KVSend,
    KVSendEnded,
)
from blockyard.shared.messages.membership import (
    FIRST_MASK_S,
    SECOND_TOKEN_S,
    STEP_TOKENS,
    AdapterUse,
    Announce,
    Leave,
    LinkLost,
    Member,
    Members,
    MembersRequest,
    ModelCard,
    NamedCount,
    RankAddress,
    RankStats,
    RefusalCount,
    Stats,
    TenantShare,
)
from blockyard.shared.messages.metrics import PastText, Scrape, Scraped, StatsRequest, StatsResponse
from blockyard.shared.messages.model_settings import (
    DEFAULT_SETTINGS,
    GrammarDefaults,
    ModelSettings,
    SamplingDefaults,
    ToolDefaults,
)
from blockyard.shared.messages.pooling import (
    NamedPrompt,
    PackedPart,
    PackedStep,
    PackedVectors,
    Pool,
    PooledStart,
    PoolingCard,
    PoolingParams,
    PoolingTask,
    TextError,
    TextsTokenized,
    TokenizeTexts,
    VectorBlock,
    VectorFailure,
)
from blockyard.shared.messages.rank_bench import DeviceRates, RankBenchLine, SumTime
from blockyard.shared.messages.requests import (
    DEFAULT_SAMPLING,
    Accepted,
    Beam,
    BeamStop,
    Cancel,
    ChoiceState,
    ExtraKey,
    Generate,
    LogitsProcessor,
    QueueCapacity,
    QueueCapacityChanged,
    Refused,
    RepetitionDetection,
    Sampling,
    TextOptions,
)
from blockyard.shared.messages.steps import (
    Attach,
    Attached,
    BlockCopy,
    BlockFetch,
    BlockSave,
    Broken,
    Fenced,
    FullBlock,
    Geometry,
    OutOfStep,
    SlotBlocks,
    SlotResult,
    SlotRun,
    SlotStart,
    StepPlan,
    StepResult,
)
from blockyard.shared.messages.stored_responses import ResponseQuery, ResponseReply, ResponseVerb, StoredResponse
from blockyard.shared.messages.streams import (
    NO_LOGPROBS,
    PathLost,
    Stop,
    StreamOpen,
    StreamRef,
    TextBatch,
    TextDelta,
    TextLogprobs,
    TokenBatch,
    TokenLogprobs,
    TokenRows,
    TokenStep,
    VectorBatch,
    decode_logprobs,
    encode_logprobs,
)
from blockyard.shared.messages.text import (
    BUSY,
    TAKES_LONG,
    UNAVAILABLE,
    DescribeTokenizer,
    Detokenize,
    Detokenized,
    TextRejected,
    Tokenize,
    Tokenized,
    TokenizerDescription,
)

RegistryIn = Announce | Leave | LinkLost | MembersRequest
GatewayIn = (
    Tokenized
    | TextsTokenized
    | Detokenized
    | TokenizerDescription
    | TextRejected
    | Accepted
    | Refused
    | QueueCapacityChanged
    | TextBatch
    | VectorBatch
    | Scrape
    | Scraped
    | Controlled
    | PathLost
    | StatsResponse
    | ResponseQuery
    | ResponseReply
)
TokenizerIn = Tokenize | TokenizeTexts | Detokenize | DescribeTokenizer
SchedulerIn = (
    Generate
    | Pool
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
    | StatsRequest
    | KVLanded
    | KVSendEnded
    | KVOpenTransfers
    | AdapterLoaded
)
DetokenizerIn = TokenBatch
WorkerIn = Attach | StepPlan | Sleep | Wake | KVReceive | KVAbort | KVAudit | LoadAdapter | DropAdapter

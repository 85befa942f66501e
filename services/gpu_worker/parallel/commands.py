"""The frames between a leader and its followers. Imports no torch.

`Command` frames are one ordered stream: a follower's steps follow from it alone. `Answer` frames go back on the same
socket, of transfers of KV blocks and of adapters that are read. Signs of life and failures travel on a socket of their
own, which threads read and write while a rank computes.
"""

from enum import Enum

from blockyard.services.kv_transfer.protocol.events import IncomingEvent, SenderEnded
from blockyard.services.kv_transfer.routes import RankPlace
from blockyard.shared.config.services.worker import WorkerConfig
from blockyard.shared.messages import AdapterPlaced, KVAbort, KVReceive, KVSend, NamedCount
from blockyard.shared.messages.base import Frame, FrameStruct


class Followers(Enum):
    """Those that a command is for."""

    ALL = "all"
    EARLIER_STAGES = "earlier stages"
    LAST_STAGE = "last stage"  # the leader's


class RankSetup(Frame, frozen=True):
    """The first frame: what a rank is."""

    config: WorkerConfig
    rank: int
    folder: str  # private to the group
    leader_pid: int


class GroupDigest(FrameStruct, frozen=True):
    """What all ranks of a group have in common."""

    build: str
    weights: str
    flags: bytes  # JSON object of settings


class RankJoin(Frame, frozen=True):
    """A rank that the leader has not started asks to be of its group, first on the link for signs, then on that for
    commands."""

    rank: int
    place: str  # where it is, in words
    digest: GroupDigest
    pid: int


class JoinAccepted(Frame, frozen=True):
    """The rank opens its link for commands."""


class JoinRefused(Frame, frozen=True):
    """The rank is none of this group."""

    detail: str
    exit_code: int
    is_taken: bool = False  # another process has its number, and may be gone without the leader knowing it yet


class GroupComplete(Frame, frozen=True):
    """All ranks have joined. The first command of one that has: `Begin` follows."""

    store: str  # host and port of torch's store


class Begin(Frame, frozen=True):
    """Load the model. Again after deep sleep."""

    stage_layers: list[int]  # number of layers of each pipeline stage; empty: there is one
    replica_folder: str = ""  # where ranks of other replicas meet those of this one; empty: each has all experts
    replica_store: str = ""  # host and port of torch's store where they do; empty: all of them are on one host


class BeginExchange(Frame, frozen=True):
    """Each replica has so many rows in the next step, with padding. 0: as many as this one."""

    num_rows: int


class ServeExperts(Frame, frozen=True):
    """Compute rows of other replicas, in a step that has none here."""


class AttentionCall(Frame, frozen=True):
    """The arguments of `CpuMetadataBuilder.attention`, int64."""

    blocks: bytes
    offsets: bytes
    tables: bytes
    counts: bytes
    lengths: bytes
    owners: bytes
    num_decodes: int


class ForwardPass(Frame, frozen=True):
    """Compute the layers."""

    attention: AttentionCall
    token_ids: bytes  # int64
    positions: bytes
    adapter_places: bytes = b""  # int32, of each token; empty: none has an adapter
    vector_rows: bytes = b""  # int64, tokens with a vector as input, see `InputVectors`
    vectors: bytes = b""  # [rows, width], in the dtype of the model


class DeviceForward(Frame, frozen=True):
    """Compute the layers on a GPU. Words are int32: ids, positions and slots of tokens that are not gathered, first
    rows of prefills, two numbers of each sequence that needs logits, and block tables.

    The numbers are the row of its last token for the last layer, and the same for its slot and position: there the
    token behind all others is of no slot.
    """

    num_tokens: int
    num_gathered: int  # the first ones are next tokens of the slots' state
    num_starts: int  # 0: there are no prefills
    num_logits: int  # below 0: all tokens are computed in the last layer
    num_decodes: int
    max_seq_len: int | None  # these are those of `AttentionMetadata`
    prefill_max_seq_len: int | None
    max_context_len: int
    has_adapters: bool = False  # those of the slots
    num_tables: int = 0  # sequences whose block tables are sent, of so many blocks; 0: tables are those of slots
    table_width: int = 0
    words: bytes = b""
    num_vectors: int = 0  # tokens with a vector as input: their rows, int64, and the vectors follow as collectives
    vector_width: int = 0
    measures_scales: bool = False  # K and V of its prompts set the scales of the KV memory, see `KVPool`
    records_layers: bool = False  # each run tells the host which layers are stored, for `SendBlocks` of that step


class PackedForward(Frame, frozen=True):
    """Compute the layers of a model without KV. Words follow as a collective, int64: ids and positions of tokens, and
    their types."""

    lengths: bytes  # int64, of the texts
    has_types: bool


class ScatterWords(Frame, frozen=True):
    """Write words of the slots' state on a GPU."""

    index: bytes  # int32
    values: bytes


class BeginGraph(Frame, frozen=True):
    """Capture what comes until `EndGraph` in a CUDA graph."""

    key: int


class EndGraph(Frame, frozen=True):
    """The graph is complete."""


class ReplayGraph(Frame, frozen=True):
    """Run a graph."""

    key: int
    words: bytes = b""  # of its forward pass, as in `DeviceForward`


class ReceiveChanges(Frame, frozen=True):
    """What the last forward pass changes of its slots follows, as a collective beside the steps."""

    num_rows: int


class TakeChanges(Frame, frozen=True):
    """Take over the changes of the oldest steps: later ones read them."""

    count: int  # of steps


class InstallKernels(Frame, frozen=True):
    """Use the kernels that the leader has measured, for numbers of rows."""

    tuned: bytes  # see `Tuner.installed`


class DropGraph(Frame, frozen=True):
    """A graph is not run again."""

    key: int


LAST_OUTPUT = -1


class ComputeLogits(Frame, frozen=True):
    """Compute the output layer of hidden states, which follow as a collective, or of the last forward pass's."""

    num_rows: int  # or LAST_OUTPUT
    has_adapters: bool = False  # their places follow, too, int32


class ForgetSequences(Frame, frozen=True):
    """Owner numbers may be used again."""


class CopyBlocks(Frame, frozen=True):
    """Copy KV blocks within the pool."""

    pairs: bytes  # int64, [2, n]: sources, then destinations


class ScrubBlocks(Frame, frozen=True):
    """Replace numbers that are not finite."""

    blocks: bytes  # int64


class SaveBlocks(Frame, frozen=True):
    """Copy KV blocks to host memory."""

    blocks: list[int]
    hosts: list[int]


class FetchBlocks(Frame, frozen=True):
    """Copy KV blocks back from host memory."""

    hosts: list[int]
    blocks: list[int]


class ReleaseMemory(Frame, frozen=True):
    """Free the KV memory, and move weights to host memory."""

    weights: bool


class ReclaimMemory(Frame, frozen=True):
    """Take back what was released."""

    weights: bool
    kv: bool


class CountExperts(Frame, frozen=True):
    """Count from here on how often experts are chosen."""


class SumExpertLoads(Frame, frozen=True):
    """Sum over ranks how often experts were chosen, as a collective of each stage, and tell the leader."""


class TradeExperts(Frame, frozen=True):
    """Pairs of experts of a layer take each other's rank and place, one pair after another."""

    stage: int
    layer: int  # counted among the stage's mixtures
    pairs: list[tuple[int, int]]


class ReadAdapter(Frame, frozen=True):
    """Read an adapter into host memory. The answer is `AdapterRead`."""

    job: int  # random, so that answers to an earlier start are known
    adapter: int  # the scheduler's number
    path: str


class ForgetAdapter(Frame, frozen=True):
    """Free an adapter's host memory."""

    adapter: int


class ForgetAdapters(Frame, frozen=True):
    """Drop all adapters, and those that are being read."""


class PlaceAdapters(Frame, frozen=True):
    """Adapters of the steps from here on."""

    placed: list[AdapterPlaced]


class OpenTransfers(Frame, frozen=True):
    """Exchange KV blocks with other workers, from the memory that there is now. The answer is `TransfersOpened`."""

    worker: int  # incarnation of the leader
    generation: int  # of the memory, at least


class SharePlaces(Frame, frozen=True):
    """Where other workers reach all ranks of this one, the leader first."""

    places: list[RankPlace]


class ReceiveBlocks(Frame, frozen=True):
    """Another worker writes blocks."""

    frame: KVReceive


class SendBlocks(Frame, frozen=True):
    """Send blocks in all layers."""

    send: KVSend
    is_running: bool = False  # the last step that records layers fills them; otherwise they are complete


class AbortBlocks(Frame, frozen=True):
    """Give up a transfer."""

    frame: KVAbort


class LosePeer(Frame, frozen=True):
    """Another worker has left the ring."""

    worker: int


class CloseTransfers(Frame, frozen=True):
    """Abort all transfers. The answer is `TransfersClosed`, behind their ends."""


class TransfersOpened(Frame, frozen=True):
    """Answers `OpenTransfers`."""

    place: RankPlace


class TransferEvents(Frame, frozen=True):
    """What has happened to transfers of a follower's part of blocks, by pairs of ranks."""

    received: list[IncomingEvent]
    sent: list[SenderEnded]
    transfer_bytes: list[NamedCount]  # sums since the transfers were opened, as in `Stats`
    frames_dropped: list[NamedCount]


class TransfersClosed(Frame, frozen=True):
    """Answers `CloseTransfers`."""


class AdapterRead(Frame, frozen=True):
    """Answers `ReadAdapter`."""

    job: int
    digest: bytes = b""
    size_bytes: int = 0  # of the rank's part
    error: str = ""
    status: int = 400  # HTTP status of the error


class LifeSign(Frame, frozen=True):
    """The process runs."""

    rss_bytes: int = 0  # of a follower
    is_serving: bool = False  # its start is over


class RankFailed(Frame, frozen=True):
    """The rank cannot go on."""

    detail: str
    exit_code: int  # of the error
    is_of_device: bool = False  # its device has failed in a step


Command = (
    RankSetup
    | GroupComplete
    | Begin
    | BeginExchange
    | ServeExperts
    | ForwardPass
    | DeviceForward
    | PackedForward
    | ScatterWords
    | BeginGraph
    | EndGraph
    | ReplayGraph
    | DropGraph
    | ReceiveChanges
    | TakeChanges
    | InstallKernels
    | ComputeLogits
    | ForgetSequences
    | CopyBlocks
    | ScrubBlocks
    | SaveBlocks
    | FetchBlocks
    | ReleaseMemory
    | ReclaimMemory
    | CountExperts
    | SumExpertLoads
    | TradeExperts
    | ReadAdapter
    | ForgetAdapter
    | ForgetAdapters
    | PlaceAdapters
    | OpenTransfers
    | SharePlaces
    | ReceiveBlocks
    | SendBlocks
    | AbortBlocks
    | LosePeer
    | CloseTransfers
)
TransferCommand = OpenTransfers | SharePlaces | ReceiveBlocks | SendBlocks | AbortBlocks | LosePeer | CloseTransfers
AdapterCommand = ReadAdapter | ForgetAdapter | ForgetAdapters | PlaceAdapters
TransferAnswer = TransfersOpened | TransferEvents | TransfersClosed
Answer = TransferAnswer | AdapterRead
Sign = LifeSign | RankFailed
JoinAnswer = JoinAccepted | JoinRefused

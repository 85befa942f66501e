"""Control frames between a worker and a matcher process, over a `FrameSocket`."""

from blockyard.services.gpu_worker.child_processes.frame_socket import ControlFrame
from blockyard.shared.messages import OutputConstraint
from blockyard.shared.messages.base import FrameStruct
from blockyard.shared.messages.grammars import GrammarEngine


class OutputRules(FrameStruct, frozen=True):
    """All that decides the masks of a slot, besides its output."""

    constraint: OutputConstraint
    allowed_token_ids: list[int]  # empty is all
    min_tokens: int
    ignore_eos: bool
    stop_token_ids: list[int]


class MatcherSettings(ControlFrame, frozen=True):
    """The first frame to a process."""

    engine: GrammarEngine
    tokenizer_path: str  # folder of the model
    vocab_size: int
    eos_token_ids: list[int]
    num_slots: int  # of the shared memory
    poll_s: float  # between looks for tokens while slots are open, if a device writes them; 0: TokensSampled tells


class SlotOpen(ControlFrame, frozen=True):
    """A slot starts. Its masks begin with the one for the token behind `output_ids`."""

    slot: int
    owner: int
    num_prompt_tokens: int
    output_ids: bytes  # uint32 each
    rules: OutputRules


class SlotClose(ControlFrame, frozen=True):
    """A slot has ended."""

    slot: int
    owner: int


class TokensSampled(ControlFrame, frozen=True):
    """The worker has written tokens of some slots to the shared memory."""


class EngineReady(ControlFrame, frozen=True):
    """The engine is loaded."""


class EngineFailed(ControlFrame, frozen=True):
    """The engine cannot be loaded: no slot will have masks. The process ends."""

    cause: str


class FirstMask(ControlFrame, frozen=True):
    """A slot has its first mask."""

    slot: int
    seconds: float  # since the process has read SlotOpen


class SlotClosed(ControlFrame, frozen=True):
    """Answers SlotClose: the process writes no mask of this slot any more."""

    slot: int
    owner: int


class SlotFailed(ControlFrame, frozen=True):
    """A slot gets no more masks."""

    slot: int
    owner: int
    cause: str


ToMatcher = MatcherSettings | SlotOpen | SlotClose | TokensSampled
FromMatcher = EngineReady | EngineFailed | FirstMask | SlotClosed | SlotFailed

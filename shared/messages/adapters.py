"""Adapters: scheduler <-> worker, operators' commands, and what gateways know of each adapter."""

from blockyard.shared.messages.base import Frame, FrameStruct


class LoadAdapter(Frame, frozen=True):
    """scheduler -> worker: read an adapter into host memory. Answered with AdapterLoaded."""

    scheduler: int  # incarnation
    adapter: int  # number that this scheduler gives it: other bytes have another number
    path: str
    is_prompt: bool = False  # a prompt adapter; False: a LoRA adapter


class DropAdapter(Frame, frozen=True):
    """scheduler -> worker: the adapter is not used any more, and no later plan places it."""

    scheduler: int
    adapter: int


class AddedToken(FrameStruct, frozen=True):
    """A token that the tokenizer of an adapter has and the model's does not."""

    token_id: int
    text: str
    is_special: bool = False


class AdapterLoaded(Frame, frozen=True):
    adapter: int
    digest: bytes = b""  # of the bytes of config and weights
    size_bytes: int = 0  # of its matrices
    error: str = ""  # why it cannot be served; empty: it is in host memory
    notes: list[str] = []
    num_virtual_tokens: int = 0  # of a prompt adapter
    max_len: int = 0  # tokens of its longest sequence, if it is for longer contexts than the model; 0: it is not
    num_added_tokens: int = 0  # ids behind the model's vocabulary
    has_tokenizer: bool = False  # its folder has one in which the model's ids keep their meaning
    added_tokens: list[AddedToken] = []  # of that tokenizer
    status: int = 400  # HTTP status of the error


class AdapterPlaced(FrameStruct, frozen=True):
    """Gives a place of the device to an adapter that is in host memory."""

    place: int
    adapter: int


class AdapterCard(FrameStruct, frozen=True):
    """An adapter that a scheduler serves, as gateways list it."""

    name: str
    root: str  # its path
    parent: str  # name of its base model
    digest: bytes
    created: int = 0  # seconds since the epoch
    num_virtual_tokens: int = 0  # of a prompt adapter: they are before each prompt; 0: it is a LoRA adapter

    max_len: int = 0  # tokens of its longest sequence, if it is for longer contexts than the model; 0: it is not
    num_added_tokens: int = 0  # ids behind the model's vocabulary, which its requests may name
    has_tokenizer: bool = False  # its requests have the tokenizer and chat templates in its folder
    was_asked_for: bool = False  # by an operator or a request; False: the scheduler's flags name it

    @property
    def is_prompt(self) -> bool:
        return self.num_virtual_tokens > 0

"""Checks a request against the model: its name, its prompt, and what the KV cache can hold."""

from collections.abc import Collection
from dataclasses import dataclass

import msgspec

from blockyard.services.scheduler.adapters.registry import Adapter, AdapterRegistry
from blockyard.services.scheduler.batch.worker_groups import WorkerGroup, longest_sequence
from blockyard.services.scheduler.sequences import transfer_params
from blockyard.services.scheduler.sequences.pooled_requests import frame_problem
from blockyard.services.scheduler.sequences.transfer_params import TransferParams
from blockyard.shared.messages import (
    DEFAULT_SETTINGS,
    Generate,
    Geometry,
    KVRole,
    ModelCard,
    ModelSettings,
    Pool,
    PoolingCard,
)
from blockyard.shared.token_ids import ID_BYTES, first_outside, num_ids, unpack, virtual_ids


@dataclass(frozen=True, slots=True)
class ServedModel:
    names: list[str]
    root: str  # empty: the first name
    created: int  # Unix time in seconds
    settings: ModelSettings = DEFAULT_SETTINGS  # for gateways


@dataclass(frozen=True, slots=True)
class ModelCapacity:
    """The limits of the model: for each, the minimum over all attached groups."""

    model_len: int  # tokens, from the model and its flags
    num_blocks: int
    block_size: int
    vocab_size: int
    eos_token_ids: list[int]
    max_cached_len: int  # tokens of the longest sequence that the blocks hold
    pooling: PoolingCard | None = None  # None: the model generates text

    @property
    def max_model_len(self) -> int:
        return min(self.model_len, self.max_cached_len)

    def validate(self, num_prompt: int, max_tokens: int, model_len: int = 0) -> str:
        """An error message if a prompt can never run, empty if it can. model_len: of its adapter; 0: the model's."""
        need, model_len = num_prompt + min(1, max_tokens), model_len or self.model_len
        if need > model_len:
            return f"the prompt's {num_prompt} tokens need a context of {need}, this model has {model_len}"
        if need > self.max_cached_len:
            num_blocks = -(-need // self.block_size)
            return (
                f"the prompt's {num_prompt} tokens need {num_blocks} KV blocks of {self.block_size} tokens, "
                f"there are {self.num_blocks}: raise --gpu-memory-utilization or --num-gpu-blocks-override"
            )
        return ""

    def card(self, model: ServedModel) -> ModelCard:
        root = model.root or model.names[0]
        return ModelCard(
            *(model.names, root, self.max_model_len, self.vocab_size, model.created, self.eos_token_ids),
            *(model.settings, self.pooling and msgspec.structs.replace(self.pooling, max_len=self.max_model_len)),
        )

    def notes(self, groups: list[WorkerGroup]) -> list[str]:
        """Lines for the start-up report."""
        by_role: dict[KVRole, list[WorkerGroup]] = {}
        for group in groups:
            by_role.setdefault(group.geometry.kv_role, []).append(group)
        notes = [line for role in sorted(by_role) for line in self._role_notes(role, by_role[role], len(by_role) > 1)]
        if self.max_model_len < self.model_len:
            longest = {role: max(group.max_model_len for group in of_role) for role, of_role in by_role.items()}
            of_role = f" of {min(longest, key=lambda role: longest[role])} groups" if len(by_role) > 1 else ""
            notes.append(
                f"max_model_len is {self.max_model_len}, not {self.model_len}: that is what the KV blocks{of_role} hold"
            )
        return notes

    def _role_notes(self, role: KVRole, groups: list[WorkerGroup], has_roles: bool) -> list[str]:
        if not groups[0].has_kv:
            count = f"{len(groups)} worker group{'s' if len(groups) != 1 else ''}"
            return [f"{count}: texts of up to {self.max_model_len} tokens, {groups[0].max_num_batched_tokens} a step"]
        num_blocks = min(group.geometry.num_blocks for group in groups)
        tokens = num_blocks * self.block_size
        kind, prefix = (f"{role} group", f"{role} batch") if has_roles else ("worker group", "batch")
        return [
            f"{len(groups)} {kind}{'s' if len(groups) != 1 else ''}, each with {num_blocks} KV blocks "
            f"of {self.block_size} tokens: {tokens} tokens, {tokens / self.max_model_len:.1f} requests of full length",
            f"{prefix}: {groups[0].max_num_seqs} sequences, {groups[0].max_num_batched_tokens} tokens a step, "
            f"{groups[0].pacer.text}",
        ]


def capacity_of(geometries: list[Geometry]) -> ModelCapacity:
    """Returns the capacity that every group has; with roles, the best pair of groups. `geometries` is not empty."""
    if len({g.kv_role for g in geometries}) > 1:
        alike = {
            (g.kv_role, g.kv_layout, g.num_blocks, g.max_model_len, g.max_num_batched_tokens): g for g in geometries
        }
        pairs = [
            [source, target]
            for source in alike.values()
            for target in alike.values()
            if source.kv_role is not KVRole.DECODE and target.kv_role is not KVRole.PREFILL and exchange(source, target)
        ]
        if pairs:
            return max(map(_least_of, pairs), key=lambda capacity: capacity.max_model_len)
    return _least_of(geometries)


def exchange(source: Geometry, target: Geometry) -> bool:
    """Whether KV blocks of one group can go to another."""
    return source.kv_layout == target.kv_layout != "" and source.block_size == target.block_size


def _least_of(geometries: list[Geometry]) -> ModelCapacity:
    return ModelCapacity(
        min(g.base_len or g.max_model_len for g in geometries),
        min(g.num_blocks for g in geometries),
        geometries[0].block_size,
        min(g.vocab_size for g in geometries),
        geometries[0].eos_token_ids,
        min(map(longest_sequence, geometries)),
        geometries[0].pooling,
    )


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error response to a request."""

    status: int  # HTTP status
    field: str
    message: str


@dataclass(frozen=True, slots=True)
class RequestAdapters:
    lora: Adapter | None = None
    prompt: Adapter | None = None

    @property
    def num_virtual(self) -> int:
        """Tokens before the client's prompt."""
        return 0 if self.prompt is None else self.prompt.num_virtual_tokens

    @property
    def model_len(self) -> int:
        """Tokens of the longest sequence; 0: as without adapters."""
        return 0 if self.lora is None else self.lora.max_len

    def frame(self, frame: Generate) -> Generate:
        """The request with the virtual tokens before its prompt.

        Hashes of an adapter that was replaced meanwhile are left out.
        """
        if self.lora is not None and self.lora.digest != frame.adapter_digest:
            frame = msgspec.structs.replace(frame, adapter_digest=self.lora.digest, block_hashes=b"")
        if self.prompt is None or not frame.prompt_ids:
            return frame
        if self.prompt.digest != frame.prompt_adapter_digest:
            frame = msgspec.structs.replace(frame, prompt_adapter_digest=self.prompt.digest, block_hashes=b"")
        return msgspec.structs.replace(frame, prompt_ids=virtual_ids(self.num_virtual) + frame.prompt_ids)


NO_ADAPTERS = RequestAdapters()


class ModelLimits:
    """Owns the model's limits, for the check of requests and for gateways."""

    def __init__(self, model: ServedModel, adapters: AdapterRegistry) -> None:
        self.card: ModelCard | None = None  # None before the first group is attached; a new object after each change
        self.notes: list[str] = []  # for the start-up report
        self.roles: frozenset[KVRole] = frozenset()  # of the groups that the notes describe
        self._model, self._adapters = model, adapters
        self._capacity: ModelCapacity | None = None  # None before the first group is attached

    def update_adapters(self) -> None:
        """Called when an adapter is served, or is not any more, or no request uses an unloaded one any more."""
        if self.card is not None:
            self.card = self._with_adapters(self.card)

    def update_capacity(self, groups: Collection[WorkerGroup]) -> None:
        """Called when a group was attached or detached. While no group is attached the last capacity stays."""
        if not groups:
            return
        self._capacity = capacity_of([group.geometry for group in groups])
        self.notes = self._capacity.notes(list(groups))
        self.roles = frozenset(group.geometry.kv_role for group in groups)
        card = self._with_adapters(self._capacity.card(self._model))
        if card != self.card:
            self.card = card

    def _with_adapters(self, card: ModelCard) -> ModelCard:
        return msgspec.structs.replace(card, adapters=self._adapters.cards, unloaded=self._adapters.unloaded)

    def validate(self, frame: Generate, model_len: int = 0) -> Refusal | None:
        """The response to an invalid request; None if it is valid. model_len: of its adapter; 0: the model's."""
        if frame.model not in self._model.names:
            return Refusal(404, "model", f"the model {frame.model!r} does not exist")
        if not frame.prompt_ids or len(frame.prompt_ids) % ID_BYTES:
            return Refusal(400, "prompt", f"the prompt must hold at least one token, got {len(frame.prompt_ids)} bytes")
        indexes = {choice.index for choice in frame.choices}
        if not indexes or len(indexes) != len(frame.choices):
            return Refusal(400, "n", f"choices must be at least one and distinct, got {len(frame.choices)}")
        if any(len(choice.output_ids) % ID_BYTES for choice in frame.choices):
            return Refusal(400, "choices", "output ids must be 4 bytes each")
        if frame.sampling.max_tokens < 0:
            return Refusal(400, "max_tokens", f"max_tokens must be at least 0, got {frame.sampling.max_tokens}")
        if frame.text is None:
            return Refusal(400, "text", "a request for text says how it is made")
        if self._capacity is not None and (pooling := self._capacity.pooling) is not None:
            return Refusal(400, "model", f"the model {frame.model!r} serves {pooling.task}, and generates no text")
        num_prompt = num_ids(frame.prompt_ids)
        problem = self._capacity.validate(num_prompt, frame.sampling.max_tokens, model_len) if self._capacity else ""
        if problem:
            return Refusal(400, "prompt", problem)
        if frame.kv_transfer_params and (problem := self._transfer_problem(frame)):
            return Refusal(400, transfer_params.FIELD, f"{transfer_params.FIELD}: {problem}")
        return None

    def _transfer_problem(self, frame: Generate) -> str:
        """Returns the error in the parameters of its KV transfer; empty: there is none."""
        if frame.attempt == 0 and self.roles == {KVRole.BOTH}:  # of a later attempt, a role's groups may be lost
            return "no worker has the role prefill or decode, so that none has a connector"
        try:
            TransferParams.read(frame.kv_transfer_params)
        except ValueError as e:
            return str(e)
        return ""

    def validate_pool(self, frame: Pool) -> Refusal | None:
        """As `validate`, of many prompts. The field is `input`, with the index of a prompt that is wrong."""
        if frame.model not in self._model.names:
            return Refusal(404, "model", f"the model {frame.model!r} does not exist")
        if problem := frame_problem(frame):
            return Refusal(400, "input", problem)
        if self._capacity is None:
            return None
        if self._capacity.pooling is None:
            return Refusal(400, "model", f"the model {frame.model!r} generates text, and makes no vectors")
        most = self._capacity.max_model_len
        for index, length in zip(unpack(frame.indexes), unpack(frame.lengths), strict=True):
            if not 0 < length <= most:
                return Refusal(400, f"input[{index}]", f"{length} tokens do not fit a length of {most}")
        if (outside := first_outside(frame.token_ids, self._capacity.vocab_size)) is not None:
            message = f"token id {outside} is outside the vocabulary of {self._capacity.vocab_size}"
            return Refusal(400, "input", message)
        return None

    def find_adapters(self, frame: Generate) -> RequestAdapters | Refusal:
        """The adapters of a request, or the response if one is not there.

        A request that has tokens of other bytes than a name has now is refused.
        """
        if not frame.adapter and not frame.prompt_adapter:
            return NO_ADAPTERS
        lora, prompt = (frame.adapter, frame.adapter_digest), (frame.prompt_adapter, frame.prompt_adapter_digest)
        found: list[Adapter | None] = []
        for is_prompt, (name, digest) in ((False, lora), (True, prompt)):
            adapter = self._adapters.find(name, digest) if name else None
            if name and (adapter is None or adapter.is_prompt != is_prompt):
                text = f"The model `{name}` does not exist any more: the adapter was unloaded."
                return Refusal(404, "model", text)
            if adapter is not None and adapter.digest != digest and any(one.output_ids for one in frame.choices):
                return Refusal(409, "model", f"the adapter {name!r} was replaced while the request ran")
            found.append(adapter)
        return RequestAdapters(*found)

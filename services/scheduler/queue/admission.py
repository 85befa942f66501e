"""Whether a Generate may be taken at all."""

from dataclasses import dataclass

from blockyard.services.scheduler.queue.capacity import ModelCapacity
from blockyard.services.scheduler.sequences.requests import ID_BYTES, num_ids
from blockyard.shared.messages import Generate


@dataclass(frozen=True, slots=True)
class Refusal:
    status: int  # HTTP status
    field: str
    message: str


class Admission:
    def __init__(self, names: list[str]) -> None:
        self.capacity: ModelCapacity | None = None  # None until a first group is attached
        self._names = names

    def validate(self, frame: Generate) -> Refusal | None:
        """What is wrong with the request itself."""
        if frame.model not in self._names:
            return Refusal(404, "model", f"the model {frame.model!r} does not exist")
        if not frame.prompt_ids or len(frame.prompt_ids) % ID_BYTES:
            return Refusal(400, "prompt", f"the prompt must hold at least one token, got {len(frame.prompt_ids)} bytes")
        indexes = {sequence.index for sequence in frame.choices}
        if not indexes or len(indexes) != len(frame.choices):
            return Refusal(400, "n", f"choices must be at least one and distinct, got {len(frame.choices)}")
        if any(len(sequence.output_ids) % ID_BYTES for sequence in frame.choices):
            return Refusal(400, "choices", "output ids must be 4 bytes each")
        if frame.sampling.max_tokens < 0:
            return Refusal(400, "max_tokens", f"max_tokens must be at least 0, got {frame.sampling.max_tokens}")
        num_prompt = num_ids(frame.prompt_ids)
        problem = self.capacity.validate(num_prompt, frame.sampling.max_tokens) if self.capacity else ""
        return Refusal(400, "prompt", problem) if problem else None

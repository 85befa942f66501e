"""What the adapters that a request names change of it: virtual tokens before its prompt, and its hashes."""

from dataclasses import dataclass

import msgspec

from blockyard.services.scheduler.adapters.registry import Adapter
from blockyard.shared.messages import Generate
from blockyard.shared.token_ids import virtual_ids


@dataclass(frozen=True, slots=True)
class RequestAdapters:
    """The adapters that a request names."""

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

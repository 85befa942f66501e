"""Settings of a detokenizer."""

import msgspec

from blockyard.shared.config.services.process import ProcessConfig


class DetokenizerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    process: ProcessConfig
    tokenizer_path: str  # folder with tokenizer.json
    served_model_names: list[str] = []

"""A random checkpoint, small enough for a test, which transformers writes and reads."""

import copy
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:  # processes that a test starts need the sizes alone
    from transformers import PreTrainedModel

VOCAB = 211
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "eos_token_id": 1,
    "bos_token_id": 0,
    "pad_token_id": None,
}
LLAMA = BASE | {
    "intermediate_size": 96,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Tiny:
    name: str
    config: Any
    model: Any
    fields: dict[str, Any]
    rope: dict[str, Any] | None = None
    old_spelling: bool = False  # rope_scaling with "type", rope_theta beside it
    rewrite: dict[str, Any] = field(default_factory=dict)  # fields of config.json as released; None: it lacks them
    seed: int = 11

    @property
    def architecture(self) -> str:
        """The name in config.json."""
        return str(self.rewrite.get("architectures", [self.model.__name__])[0])

    def _make_config(self) -> Any:
        fields = copy.deepcopy(self.fields)
        if self.rope is not None:
            fields["rope_parameters"] = {"rope_theta": 5000.0, **self.rope}
        return self.config(**fields)

    def config_json(self) -> dict[str, Any]:
        """The fields of config.json in transformers' spelling, without writing a checkpoint."""
        fields = json.loads(self._make_config().to_json_string(use_diff=False))
        fields |= {"architectures": [self.model.__name__]} | self.rewrite
        return {key: value for key, value in fields.items() if value is not None}

    def save(self, folder: Path) -> "PreTrainedModel":
        """Writes the checkpoint and returns transformers' model, float32."""
        config = self._make_config()
        config._attn_implementation = config._experts_implementation = "eager"
        torch.manual_seed(self.seed)
        model = self.model(config).eval()
        with torch.no_grad():  # norms and biases start as ones and zeros, which would hide mistakes
            for name, value in model.named_parameters():
                if ("norm" in name or ".ln_" in name) and name.endswith("weight"):
                    value.add_(torch.randn_like(value), alpha=0.1)
                elif name.endswith("bias"):
                    value.normal_(0, 0.1)
                elif name.endswith("scale"):
                    value.add_(torch.randn_like(value), alpha=0.3)
            for name, value in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    value.normal_(0, 0.3)
                elif name.endswith("layer_scalar"):
                    value.uniform_(0.7, 1.1)
        model.save_pretrained(folder, max_shard_size="150KB")
        if self.old_spelling:
            self._spell_old(folder / "config.json")
        if self.rewrite:
            path = folder / "config.json"
            config = json.loads(path.read_text()) | self.rewrite
            path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
        return model

    def _spell_old(self, path: Path) -> None:
        config = json.loads(path.read_text())
        rope = config.pop("rope_parameters")
        config["rope_theta"] = rope.pop("rope_theta")
        rope["type"] = rope.pop("rope_type")
        config["rope_scaling"] = rope
        path.write_text(json.dumps(config))

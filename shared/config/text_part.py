"""The settings of the text model in the config.json of a model that also sees or hears."""

from collections.abc import Mapping
from typing import Any

_TIE = "tie_word_embeddings"
_OF_WHOLE = (
    "architectures",
    "eos_token_id",
    _TIE,
)  # the whole model's values are used, not the text part's
_HEAD_IN_TEXT_PART = ["Llama4ForConditionalGeneration"]  # whose text part's flag holds for its head
_OF_BOTH = ("model_type", "dtype", "torch_dtype", "quantization_config", "bos_token_id", "pad_token_id")  # or those


def text_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of `text_config`, or of the whole model where there is none.

    Of the whole model's other fields only those of all its parts count, as in transformers: sizes, rotations and
    windows beside `text_config` are not the text part's.
    """
    text = config.get("text_config")
    if not isinstance(text, dict):
        return dict(config)
    whole = {key: config[key] for key in (*_OF_WHOLE, *_OF_BOTH) if config.get(key) is not None}
    if config.get("architectures") == _HEAD_IN_TEXT_PART:
        whole.pop(_TIE, None)
    return whole | text | {key: whole[key] for key in _OF_WHOLE if key in whole}

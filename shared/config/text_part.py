"""The settings of the text model in the config.json of a model that also sees or hears."""

from collections.abc import Mapping
from typing import Any

from blockyard.shared.errors import ConfigError
from blockyard.shared.quantization.reading import CONFIG, KEY

TEXT = "text_config"
_TIE = "tie_word_embeddings"
_OF_WHOLE = (
    "architectures",
    "eos_token_id",
    _TIE,
)  # the whole model's values are used, not the text part's
_HEAD_IN_TEXT_PART = ["Llama4ForConditionalGeneration"]  # whose text part's flag holds for its head
_QUANTIZED = (KEY, "compression_config")
_OF_BOTH = ("model_type", "dtype", "torch_dtype", *_QUANTIZED, "bos_token_id", "pad_token_id")  # or those


def text_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of `text_config`, or of the whole model where there is none.

    Of the whole model's other fields only those of all its parts count, as in transformers: sizes, rotations and
    windows beside `text_config` are not the text part's. Raises ConfigError if both say differently how weights are
    quantized.
    """
    text = config.get(TEXT)
    if not isinstance(text, dict):
        return dict(config)
    whole = {key: config[key] for key in (*_OF_WHOLE, *_OF_BOTH) if config.get(key) is not None}
    if config.get("architectures") == _HEAD_IN_TEXT_PART:
        whole.pop(_TIE, None)
    for key in _QUANTIZED:
        if whole.get(key) and text.get(key):
            _check_same(key, whole[key], text[key])
    unsaid = {key for key in _OF_BOTH if key in whole and text.get(key) in (None, {})}
    return whole | text | {key: whole[key] for key in (*_OF_WHOLE, *unsaid) if key in whole}


def text_patch(patch: Mapping[str, Any]) -> dict[str, Any]:
    """Returns overrides of a config.json as overrides of its `text_part`. What is not in `text_config` counts."""
    text = patch.get(TEXT)
    return {**text, **{key: patch[key] for key in patch if key != TEXT}} if isinstance(text, dict) else dict(patch)


def _check_same(key: str, whole: Any, text: Any) -> None:
    """Raises ConfigError naming the first field that differs. Null is as good as nothing."""
    what = "differ"
    if isinstance(whole, Mapping) and isinstance(text, Mapping):
        field = next((one for one in (*whole, *text) if whole.get(one) != text.get(one)), None)
        if field is None:
            return
        what = f"differ in {field}: {_show(whole, field)} and {_show(text, field)}"
    raise ConfigError(f"{CONFIG}: {key} and {TEXT}.{key} {what}")


def _show(said: Mapping[str, Any], field: str) -> str:
    return repr(said[field])[:80] if said.get(field) is not None else "none"

"""Which template renders a query and a document."""

import json
from pathlib import Path
from typing import Any

import pytest

from blockyard.shared.config.pooling.pair_templates import QWEN3_RERANKER, choose_pair_template

QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
TEMPLATE = "{{ query }} {{ document }}"
MESSAGES = {"modality_config": {"text": {}, "message": {"format": "flat"}}}
TEXTS = {"modality_config": {"text": {}}}


def _folder(folder: Path, template: str | None, length_file: dict[str, Any] | None) -> Path:
    """length_file: beside a modules.json with a LogitScore; None: there is no modules.json."""
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    if length_file is not None:
        kinds = {"": "Transformer", "1_LogitScore": "LogitScore"}
        modules = [{"path": path, "type": f"sentence_transformers.{kind}"} for path, kind in kinds.items()]
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_LogitScore").mkdir()
        (folder / "1_LogitScore" / "config.json").write_text('{"true_token_id": 3}')
        (folder / "sentence_bert_config.json").write_text(json.dumps(length_file))
    return folder


@pytest.mark.parametrize(
    ("template", "length_file", "more", "expected"),
    [
        (None, TEXTS, {}, None),
        (TEMPLATE, TEXTS, {}, None),
        (TEMPLATE, {}, {}, None),  # of a release without the field
        (TEMPLATE, MESSAGES, {}, TEMPLATE),
        ("{{ messages }}", MESSAGES, {}, "{{ messages }}"),
        ("{{ messages }}", None, {}, None),
        (TEMPLATE, None, {}, TEMPLATE),
        (None, None, {"classifier_from_token": ["no", "yes"]}, None),
        (None, None, {"classifier_from_token": ["no", "yes"], "is_original_qwen3_reranker": True}, QWEN3_RERANKER),
        (None, TEXTS, {"is_original_qwen3_reranker": True}, QWEN3_RERANKER),
    ],
)
def test_the_template_of_a_folder(
    template: str | None, length_file: dict[str, Any] | None, more: dict[str, Any], expected: str | None, tmp_path: Path
) -> None:
    folder = _folder(tmp_path, template, length_file)
    assert choose_pair_template("score", QWEN3 | more, folder, folder, None) == expected


def test_that_of_the_flag_goes_first(tmp_path: Path) -> None:
    folder = _folder(tmp_path, TEMPLATE, TEXTS)
    assert choose_pair_template("score", QWEN3, folder, folder, "given") == "given"
    assert choose_pair_template("embed", QWEN3, folder, folder, "given") is None

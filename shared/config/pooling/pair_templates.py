"""Chooses the template that renders a query and a document to one prompt, for rerankers that are language models."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blockyard.shared.chat_template_files import chat_templates
from blockyard.shared.config.pooling.sentence_modules import read_modules
from blockyard.shared.config.pooling.task_choice import CLASSIFIER_TOKENS

_NAMES = ("query", "document")  # what such a template shows

# of the model card of Qwen3-Reranker; jinja drops the last line break
QWEN3_RERANKER = """\
<|im_start|>system
Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the answer \
can only be "yes" or "no".<|im_end|>
<|im_start|>user
<Instruct>: {{ instruction or "Given a web search query, retrieve relevant passages that answer the query" }}
<Query>: {{ query }}
<Document>: {{ document }}<|im_end|>
<|im_start|>assistant
<think>

</think>


"""


def choose_pair_template(task: str, config: Mapping[str, Any], folder: Path, given: str | None) -> str | None:
    """Returns the template of pairs; None: the tokenizer joins both texts.

    config: config.json with --hf-overrides. given: the text of --chat-template, which goes before the folder's.
    Raises ConfigError or LoadError for files that are wrong.
    """
    if task != "score":
        return None
    if given is not None:
        return given
    if folder.is_dir():
        found = chat_templates(folder).values()
        if (own := next((text for text in found if all(name in text for name in _NAMES)), None)) is not None:
            return own
    if config.get("is_original_qwen3_reranker"):
        return QWEN3_RERANKER
    modules = read_modules(folder) if folder.is_dir() else None
    compares = config.get(CLASSIFIER_TOKENS) is not None or (modules is not None and modules.logit_score is not None)
    return QWEN3_RERANKER if compares and config.get("model_type") == "qwen3" else None

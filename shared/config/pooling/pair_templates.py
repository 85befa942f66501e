"""Chooses the template that renders a query and a document to one prompt, for rerankers that are language models."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blockyard.shared.chat_template_files import chat_templates
from blockyard.shared.config.pooling.sentence_modules import read_modules
from blockyard.shared.config.pooling.sentence_settings import read_settings

_NAMES = ("query", "document")  # by which a template is one of pairs

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


def choose_pair_template(
    task: str, config: Mapping[str, Any], folder: Path, tokenizer_folder: Path, given: str | None
) -> str | None:
    """Returns the template of pairs; None: the tokenizer joins both texts.

    config: config.json with --hf-overrides. given: the text of --chat-template, which goes before that of the
    tokenizer's folder. As in sentence-transformers the latter counts in a folder with modules.json only if the
    Transformer has messages, and then whatever it shows. Raises ConfigError or LoadError for files that are wrong.
    """
    if task != "score":
        return None
    if given is not None:
        return given
    if (own := _of_folder(folder, tokenizer_folder)) is not None:
        return own
    return QWEN3_RERANKER if config.get("is_original_qwen3_reranker") else None


def _of_folder(folder: Path, tokenizer_folder: Path) -> str | None:
    templates = chat_templates(tokenizer_folder) if tokenizer_folder.is_dir() else {}
    modules = read_modules(folder)
    if modules is None:
        return next((text for text in templates.values() if all(name in text for name in _NAMES)), None)
    has_messages = read_settings(folder, modules.transformer_folder).messages.writes_texts
    return templates.get("default") if has_messages else None

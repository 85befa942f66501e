"""The tokenizers and chat templates that adapters bring with them, in one text worker."""

import logging
from pathlib import Path

from blockyard.services.tokenizer_pool.chats.chat_template import ChatTemplates
from blockyard.services.tokenizer_pool.text_codec import TextCodec
from blockyard.services.tokenizer_pool.token_chars import max_token_chars
from blockyard.services.tokenizer_pool.workers.job_limits import ProcessLimits
from blockyard.shared import tokenizer_files
from blockyard.shared.chat_template_files import chat_templates
from blockyard.shared.config.services.tokenizer import TokenizerConfig
from blockyard.shared.errors import LoadError, RequestError
from blockyard.shared.lora.adapter_folder import without_folder
from blockyard.shared.messages import AdapterTokenizer

log = logging.getLogger(__name__)

MOST = 4  # that a worker keeps: each takes as much memory as the model's


def load_adapter_texts(path: str, config: TokenizerConfig) -> TextCodec:
    """The tokenizer in an adapter's folder, with the model's chat templates if it has none. Raises LoadError."""
    files, model = tokenizer_files.load(path), Path(config.tokenizer_path)
    templates = files.chat_templates or chat_templates(model.parent if model.is_file() else model)
    if config.chat_template is not None:
        templates = {"default": config.chat_template}
    settings, eos = tokenizer_files.settings(path, templates), files.special_tokens.get("eos_token", "")
    columns = (config, max_token_chars(files.tokenizer), settings, eos)
    return TextCodec(files.tokenizer, files.vocab_size, ChatTemplates(templates, files.special_tokens), *columns)


class AdapterCodecs:
    """Finds the codec of a request, and loads that of an adapter when its first request comes.

    A tokenizer takes as much memory as a hundred prompts. It is loaded outside the limits of a job, and what it takes
    is no growth for which the worker would be replaced: the next one would load it again.
    """

    def __init__(self, base: TextCodec, config: TokenizerConfig, phases: ProcessLimits) -> None:
        """phases: limits of this worker's jobs."""
        self._base, self._config, self._phases = base, config, phases
        self._codecs: dict[tuple[str, bytes], TextCodec] = {}  # by path and digest, the one last used at the end

    def of(self, adapter: AdapterTokenizer | None, vocab_size: int) -> TextCodec:
        """vocab_size: of the model; 0: not known. Raises RequestError if the adapter's tokenizer cannot be read."""
        if adapter is None:
            self._base.set_model_vocab_size(vocab_size)
            return self._base
        codec = self._base if not adapter.path else self._own(adapter)
        codec.set_model_vocab_size(vocab_size + adapter.num_added_tokens if vocab_size else 0)
        return codec

    def _own(self, adapter: AdapterTokenizer) -> TextCodec:
        key = adapter.path, adapter.digest
        codec = self._codecs.pop(key, None)
        if codec is None:
            try:
                with self._phases.unlimited():
                    codec = load_adapter_texts(adapter.path, self._config)
            except (LoadError, OSError) as e:
                log.warning("the tokenizer of an adapter cannot be read: %s", e)
                cause = without_folder(e, Path(adapter.path))
                raise RequestError(f"the tokenizer of the adapter cannot be read: {cause}", "model") from e
            codec.set_phases(self._phases)
        self._codecs[key] = codec
        if len(self._codecs) > MOST:
            del self._codecs[next(iter(self._codecs))]
        return codec

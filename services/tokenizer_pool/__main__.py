"""`python -m blockyard.services.tokenizer_pool SETTINGS`: text and chats to token ids."""

import asyncio
import gc
import logging
import sys

import uvloop

from blockyard.services.tokenizer_pool.chat_template import ChatTemplates
from blockyard.services.tokenizer_pool.render_limits import RenderLimits
from blockyard.services.tokenizer_pool.service import TokenizerPool
from blockyard.services.tokenizer_pool.texts import Texts
from blockyard.shared import settings, tokenizer_files
from blockyard.shared.bus import Links
from blockyard.shared.config.tokenizer import TokenizerConfig
from blockyard.shared.errors import ConfigError, RequestError
from blockyard.shared.messages import Role, TokenizerIn
from blockyard.shared.serving import publish, run_until_stopped

log = logging.getLogger(__name__)


def load_texts(config: TokenizerConfig) -> tuple[Texts, list[str]]:
    """The tokenizer of the settings, and what it is in words."""
    files = tokenizer_files.load(config.tokenizer_path)
    templates = files.chat_templates if config.chat_template is None else {"default": config.chat_template}
    chats = ChatTemplates(templates, files.special_tokens, RenderLimits())
    try:
        chats.check()
    except RequestError as e:
        if config.chat_template is not None:
            raise ConfigError(f"--chat-template: {e}") from e
        log.warning("chats will be refused: %s", e)
    texts = Texts(
        files.tokenizer,
        files.vocab_size,
        chats,
        config.block_size,
        config.block_scope,
        config.trust_request_chat_template,
        config.chat_template_content_format,
    )
    return texts, [f"vocabulary {files.vocab_size}", f"chat template {'yes' if templates else 'no'}"]


async def serve_async(config: TokenizerConfig) -> None:
    model = config.served_model_names[0] if config.served_model_names else ""
    # its own heartbeat: a long text keeps the loop busy for seconds
    links: Links[TokenizerIn] = Links(
        config.process.name, Role.TOKENIZER_POOL, config.process.bus, TokenizerIn, model, own_heartbeat=True
    )
    with links:
        links.update(phase="loading tokenizer")
        texts, notes = load_texts(config)
        pool = TokenizerPool(links, texts, config.served_model_names)
        gc.collect()
        gc.freeze()
        links.update(ready=True, phase="ready", progress=1.0, notes=notes)
        await run_until_stopped(pool.run(links), publish(pool.count))


def serve(config: TokenizerConfig) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve_async(config))


if __name__ == "__main__":
    sys.exit(settings.run(TokenizerConfig, serve))

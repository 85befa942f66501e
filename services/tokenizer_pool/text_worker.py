"""`python -m blockyard.services.tokenizer_pool.text_worker FD`: the fork server of workers that render, encode, decode.

It loads the tokenizer and chat templates once. Its workers run templates of clients in a sandbox, under limits.
"""

import logging
import os
import socket
import traceback

import msgspec

from blockyard.services.tokenizer_pool.adapter_codecs import AdapterCodecs
from blockyard.services.tokenizer_pool.chats.chat_template import ChatTemplates
from blockyard.services.tokenizer_pool.text_codec import TextCodec
from blockyard.services.tokenizer_pool.token_chars import max_token_chars
from blockyard.services.tokenizer_pool.workers import fork_server
from blockyard.services.tokenizer_pool.workers.fork_server import ServerSettings
from blockyard.services.tokenizer_pool.workers.job_limits import JobLimits, ProcessLimits
from blockyard.services.tokenizer_pool.workers.worker_frames import Answer, Task, Work, framed, read_frame
from blockyard.shared import tokenizer_files
from blockyard.shared.config.services.tokenizer import TokenizerConfig
from blockyard.shared.errors import ConfigError, RequestError
from blockyard.shared.messages import Detokenize, TextRejected, Tokenize
from blockyard.shared.process.cores import usable_cores

log = logging.getLogger(__name__)

PARALLELISM = "TOKENIZERS_PARALLELISM"
CORES_OF_A_THREAD, MOST_THREADS = 4, 4  # of those that encode the texts of a job


class TextWorkload:
    """The tokenizer and chat templates of a model."""

    def __init__(self, settings: ServerSettings) -> None:
        self._texts, self.notes = load_texts(settings.config)
        self._config, self._limits = settings.config, settings.limits

    def serve(self, sock: socket.socket) -> None:
        """Answers jobs in order until the service closes the stream or the process grows too much."""
        _serve(sock, self._texts, self._config, self._limits)


def use_threads(cores: int) -> None:
    """Has many texts of a job encoded by several threads, where there are cores for them. To be called by the process
    that encodes; a single text always takes one thread."""
    num = min(cores // CORES_OF_A_THREAD, MOST_THREADS)
    if num > 1:
        os.environ |= {PARALLELISM: "true", "RAYON_NUM_THREADS": str(num)}


def load_texts(config: TokenizerConfig) -> tuple[TextCodec, list[str]]:
    """Returns the configured tokenizer and a description of it."""
    os.environ[PARALLELISM] = "false"  # no threads before the fork
    files = tokenizer_files.load(config.tokenizer_path)
    templates = files.chat_templates if config.chat_template is None else {"default": config.chat_template}
    chats = ChatTemplates(templates, files.special_tokens)
    try:
        chats.check()
    except RequestError as e:
        if config.chat_template is not None:
            raise ConfigError(f"--chat-template: {e}") from e
        log.warning("chats will be refused: %s", e)
    settings = tokenizer_files.settings(config.tokenizer_path, templates)
    texts = TextCodec(files.tokenizer, files.vocab_size, chats, config, max_token_chars(files.tokenizer), settings)
    return texts, [f"vocabulary {files.vocab_size}", f"chat template {'yes' if templates else 'no'}"]


def _serve(sock: socket.socket, texts: TextCodec, config: TokenizerConfig, limits: JobLimits) -> None:
    use_threads(usable_cores())
    phases = ProcessLimits(limits)
    texts.set_phases(phases)
    codecs = AdapterCodecs(texts, config, phases)
    decoder = msgspec.msgpack.Decoder(Task)
    with sock, sock.makefile("rb") as stream:
        while (data := read_frame(stream)) is not None:
            task = decoder.decode(data)
            del data
            adapter = task.work.adapter if isinstance(task.work, Tokenize | Detokenize) else None
            try:
                codec = codecs.of(adapter, task.vocab_size)
            except RequestError as e:
                sock.sendall(framed(TextRejected(task.work.request_id, e.field, str(e))))
                continue
            phases.begin(task.max_model_len, task.work.quick)
            sock.sendall(framed(_answer(codec, task.work)))
            if phases.has_grown():
                return


def _answer(texts: TextCodec, work: Work) -> Answer:
    try:
        return texts.answer(work)
    except MemoryError as e:  # outside the phases: block hashes, the answer itself
        traceback.clear_frames(e.__traceback__)
        return TextRejected(work.request_id, "prompt", "the prompt needs too much memory")


if __name__ == "__main__":
    fork_server.run("text", lambda settings, control: TextWorkload(settings))

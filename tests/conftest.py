"""Small tokenizers of the two great families, trained here, for every test that turns text into ids.

A test that fails is named at once: a run that a time limit cuts off has no summary. The garbage collector passes over
what collecting the tests and earlier modules left: walking it again and again took as long as the imports, and a
worker's sleep collects garbage itself. A process of tests ends without the interpreter's clean-up, which would walk all
of it, too: that took 2 to 3 s in each.
"""

import atexit
import gc
import os
import sys
from functools import partial

import pytest
from hypothesis import settings
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

settings.register_profile("long", deadline=None)  # `make test-long`: tests that ask for the profile's name do more

CORPUS = [
    "def stop(text: str, stops: list[str]) -> str:\n    return text",
    "The quick brown fox jumps over the lazy dog; it isn't the first time, is it?",
    "naïve café, Übergröße, 東京都, привет мир, 🎉 party 🙂 time",
    "one two three four five six seven eight nine ten " * 3,
]
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]


class FailureLines:
    """A pytest plugin that writes a line for each failed test."""

    def __init__(self, config: pytest.Config) -> None:
        self._plugins = config.pluginmanager

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        reporter = self._plugins.get_plugin("terminalreporter")  # processes of xdist have none
        if report.failed and reporter is not None:
            reporter.write_line(f"\nFAILED {report.nodeid}")


def end(session: pytest.Session, pid: int) -> None:
    """Ends the process, if it is not a fork, with the exit code that pytest would end it with."""
    if os.getpid() == pid:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(session.exitstatus)


def pytest_sessionstart(session: pytest.Session) -> None:
    atexit.register(partial(end, session, os.getpid()))  # runs behind what tests and packages register


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(FailureLines(config))
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _pass_over_earlier_modules() -> None:
    gc.collect()  # what is left is in use: imported modules and caches
    gc.freeze()


@pytest.fixture(scope="session")
def byte_tokenizer() -> Tokenizer:
    """Byte-level BPE, a BOS by its post-processor, an added token that is not special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think> é", special=False), AddedToken("[TOOL]", special=False)])
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s>:0 $A:0", special_tokens=[("<s>", bos)])
    return tokenizer


def _sentencepiece_like(decoder: decoders.Decoder) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoder
    byte_tokens = [f"<0x{b:02X}>" for b in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=["<unk>", *SPECIAL], limit_alphabet=60, show_progress=False
    )
    plain = [text for text in CORPUS if text.isascii()]
    tokenizer.train_from_iterator(plain, trainer)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in byte_tokens])
    return tokenizer


@pytest.fixture(scope="session")
def sentence_tokenizer() -> Tokenizer:
    """A tokenizer like Llama 2's: byte fallback, a leading space that decoding strips."""
    return _sentencepiece_like(
        decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    )


@pytest.fixture(scope="session")
def metaspace_tokenizer() -> Tokenizer:
    return _sentencepiece_like(decoders.Metaspace("▁", "always"))


@pytest.fixture(scope="session")
def word_tokenizer() -> Tokenizer:
    """WordPiece: its decoder puts spaces between tokens, so neighbours decide."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]", "[CLS]"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer

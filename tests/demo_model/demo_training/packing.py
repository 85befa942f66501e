"""Token streams for training: every epoch holds the whole corpus once and fresh draws of chats and snippets."""

import random
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from demo_training.chat_examples import conversations, snippets
from demo_training.corpus import SourceFile, Split
from demo_training.train_tokenizer import BOS, EOS

Ids = npt.NDArray[np.uint16]


def encode_documents(tokenizer: Tokenizer, documents: list[str], bos: bool = True) -> list[Ids]:
    """One array a document: <bos>, its ids, <eos>. `bos=False` for text that brings its own."""
    head = [tokenizer.token_to_id(BOS)] if bos else []
    tail = [tokenizer.token_to_id(EOS)]
    encodings = tokenizer.encode_batch(documents, add_special_tokens=False)
    return [np.array([*head, *encoding.ids, *tail], dtype=np.uint16) for encoding in encodings]


def cut_text(text: str, every_chars: int, rng: random.Random) -> list[str]:
    """Pieces of about `every_chars`, which joined are the text again.

    Encoded one by one they show the model what a prompt's end does to tokens: a line break alone, where running text
    has it in one token with the indentation that follows. Without them a prompt that ends with a line break is
    answered as if the next line could not be indented.
    """
    places = {rng.randrange(len(text)) for _ in range(len(text) // every_chars)}
    ends = {0, len(text)}
    for place in places:
        kind = rng.random()
        line_break = text.find("\n", place)
        if line_break < 0 or kind < 0.2:
            ends.add(place)  # anywhere
        elif kind < 0.7:
            ends.add(line_break + 1)  # the prompt ends with the line break
        else:
            rest = text[line_break + 1 : line_break + 64]
            ends.add(line_break + 1 + len(rest) - len(rest.lstrip(" ")))  # or with the indentation after it
    marks = sorted(ends)
    return [text[start:end] for start, end in pairwise(marks)]


def encode_cut_documents(tokenizer: Tokenizer, documents: list[str], every_chars: int, seed: int) -> list[Ids]:
    """Does what `encode_documents` does, with the text cut before it is encoded; 0 cuts nothing."""
    if every_chars == 0:
        return encode_documents(tokenizer, documents)
    rng = random.Random(seed)
    bos, eos = [tokenizer.token_to_id(BOS)], [tokenizer.token_to_id(EOS)]
    result = []
    for document in documents:
        encodings = tokenizer.encode_batch(cut_text(document, every_chars, rng), add_special_tokens=False)
        ids = chain(bos, chain.from_iterable(encoding.ids for encoding in encodings), eos)
        result.append(np.fromiter(ids, dtype=np.uint16))
    return result


@dataclass(frozen=True, slots=True)
class Mixture:
    plain: list[Ids]
    chats: list[Ids]
    snippets: list[Ids]
    chat_share: float  # of an epoch's tokens
    snippet_share: float

    def epoch(self, rng: np.random.Generator) -> Ids:
        """One epoch as one stream, the documents in random order."""
        num_plain = sum(map(len, self.plain))
        total = num_plain / (1 - self.chat_share - self.snippet_share)
        documents = [
            *self.plain,
            *draw(self.chats, total * self.chat_share, rng),
            *draw(self.snippets, total * self.snippet_share, rng),
        ]
        order = rng.permutation(len(documents))
        return np.concatenate([documents[index] for index in order])


def draw(documents: list[Ids], num_tokens: float, rng: np.random.Generator) -> list[Ids]:
    """Random documents, none twice, until they hold `num_tokens` or are all taken."""
    order = rng.permutation(len(documents))
    ends = np.cumsum([len(documents[index]) for index in order])
    return [documents[index] for index in order[: int(np.searchsorted(ends, num_tokens))]]


def build_mixture(
    tokenizer: Tokenizer, files: list[SourceFile], chat_share: float, snippet_share: float, cut_every: int, seed: int
) -> Mixture:
    train = [file for file in files if file.split is Split.TRAIN]
    return Mixture(
        plain=encode_cut_documents(tokenizer, [file.text for file in train], cut_every, seed),
        chats=encode_documents(tokenizer, conversations(train, seed), bos=False),
        snippets=encode_cut_documents(tokenizer, snippets(train), cut_every, seed),
        chat_share=chat_share,
        snippet_share=snippet_share,
    )


def windows(stream: Ids, length: int, rng: np.random.Generator) -> Ids:
    """[count, length + 1] windows of the stream in random order; inputs and targets overlap by one."""
    offset = int(rng.integers(0, length))
    count = (len(stream) - 1 - offset) // length
    starts = offset + length * rng.permutation(count)
    cut: Ids = stream[starts[:, None] + np.arange(length + 1)]
    return cut

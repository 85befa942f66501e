"""Writes texts of a grammar with random tokens that its masks allow."""

import random
from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer

from blockyard.shared.grammars.interface import CompiledGrammar, Vocabulary
from blockyard.shared.grammars.token_texts import token_texts


class Writer:
    """Draws tokens of one vocabulary. Those that end strings and brackets come more often.

    `shown`: special tokens whose text is a part of the texts; that of others is not.
    """

    def __init__(self, vocabulary: Vocabulary, shown: Sequence[str] = ()) -> None:
        self._tokenizer = Tokenizer.from_str(vocabulary.tokenizer_json)
        self._is_eos = np.isin(np.arange(vocabulary.vocab_size), vocabulary.eos_token_ids)
        self._words = np.zeros(vocabulary.num_mask_words, dtype=np.int32)
        self._texts = token_texts(vocabulary)
        for text in shown:
            token_id = self._tokenizer.token_to_id(text)
            if token_id is not None:
                self._texts[token_id] = text.encode()
        self._ends = np.array([bool(text.strip()) and not text.strip(b'"]}0123456789') for text in self._texts])

    def write(self, compiled: CompiledGrammar, rng: random.Random, most: int = 400, begin: str = "") -> str | None:
        """Returns None for a text that does not end. It starts with `begin`, as the tokenizer spells it."""
        matcher, out = compiled.matcher(), b""
        for token in self._tokenizer.encode(begin, add_special_tokens=False).ids:
            assert matcher.accept([token]) == 1, (begin, out)
            out += self._texts[token]
        for index in range(most):
            matcher.fill(self._words)
            allowed = np.flatnonzero(np.unpackbits(self._words.view(np.uint8), bitorder="little"))
            texts = allowed[~self._is_eos[allowed]]
            may_end = len(texts) < len(allowed)
            if may_end and (not len(texts) or index > 60 or rng.random() < 0.3):
                return out.decode("utf-8", "replace")  # as the detokenizer
            ends = texts[self._ends[texts]]
            chosen = ends if len(ends) and rng.random() < (0.3 if index < 60 else 0.8) else texts
            token = int(chosen[rng.randrange(len(chosen))])
            assert matcher.accept([token]) == 1
            out += self._texts[token]
        return None

import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

# importlib mode puts no test folder on the path; these tests share a module
sys.path.append(str(Path(__file__).parent))

from grammar_rig import NUM_TOKENS, VOCABULARY

from blockyard.shared.grammars.engines import Engines
from blockyard.shared.grammars.token_texts import token_texts


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_str(VOCABULARY.tokenizer_json)


@pytest.fixture(scope="session")
def engines() -> Engines:
    return Engines(VOCABULARY)


@pytest.fixture(scope="session")
def texts() -> list[bytes]:
    """The bytes of each token; none for special ones."""
    found = token_texts(VOCABULARY)
    assert found[NUM_TOKENS:] == [b""] * (VOCABULARY.vocab_size - NUM_TOKENS)
    return found

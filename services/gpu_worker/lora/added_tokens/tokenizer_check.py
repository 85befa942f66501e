"""Reads the tokenizer in an adapter's folder, and checks that the ids of the model's tokenizer keep their meaning."""

from hashlib import blake2b
from pathlib import Path

import msgspec

from blockyard.shared import tokenizer_files
from blockyard.shared.errors import LoadError
from blockyard.shared.messages import AddedToken

TOKENIZERS = ("tokenizer.json", "vocab.json")  # a folder with one of these has a tokenizer
FILES = (*TOKENIZERS, "merges.txt", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja")
DIGEST_BYTES = 16


class AdapterTexts(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the tokenizer in an adapter's folder says."""

    added: list[AddedToken]  # tokens that the model's tokenizer does not have
    problem: str = ""  # why it is not used; empty: prompts of the adapter's requests are encoded with it
    digest: bytes = b""  # of its files


class TokenizerCheck:
    """Keeps the tokens of the model's tokenizer, once it is needed."""

    def __init__(self, model_tokenizer: str) -> None:
        self._path, self._tokens = model_tokenizer, dict[str, int]()

    def read(self, folder: Path) -> AdapterTexts | None:
        """None: the folder has no tokenizer."""
        if not any((folder / name).is_file() for name in TOKENIZERS):
            return None
        try:
            if not self._tokens:
                self._tokens = tokenizer_files.load(self._path).tokenizer.get_vocab(with_added_tokens=True)
            own = tokenizer_files.load(folder).tokenizer
        except LoadError as e:
            return AdapterTexts([], problem=str(e))
        tokens = own.get_vocab(with_added_tokens=True)
        changed = self._tokens.items() - tokens.items()
        if changed:
            text, token_id = min(changed, key=lambda entry: entry[1])
            return AdapterTexts([], f"{len(changed)} tokens have other ids in it, such as {token_id}, {text!r}")
        special = {i for i, token in own.get_added_tokens_decoder().items() if token.special}
        added = sorted((i, text) for text, i in tokens.items() - self._tokens.items())
        return AdapterTexts([AddedToken(i, text, i in special) for i, text in added], digest=_digest(folder))


def _digest(folder: Path) -> bytes:
    digest = blake2b(digest_size=DIGEST_BYTES)
    for pattern in (*FILES, *TEMPLATES):
        for path in sorted(folder.glob(pattern)):
            content = path.read_bytes()
            digest.update(b"%s %d " % (path.name.encode(), len(content)) + content)
    return digest.digest()

"""Reads the tokenizer in an adapter's folder, and checks that the ids of the model's tokenizer keep their meaning."""

import threading
from hashlib import blake2b
from pathlib import Path

import msgspec

from blockyard.shared import tokenizer_files
from blockyard.shared.errors import LoadError
from blockyard.shared.lora.adapter_folder import without_folder
from blockyard.shared.messages import AddedToken
from blockyard.shared.tokenizer_files import TokenizerFiles

TOKENIZERS = ("tokenizer.json", "vocab.json")  # a folder with one of these has a tokenizer
READ = (  # by `tokenizer_files`, of a folder, besides chat templates in a folder of their own
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt"),
    *("added_tokens.json", "chat_template.jinja", "chat_template.json"),
)
DIGEST_BYTES = 16
MOST_ADDED = 4096  # tokens that a tokenizer may have beside the model's: each goes to the detokenizer with a request


class AdapterTexts(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the tokenizer in an adapter's folder says."""

    added: list[AddedToken]  # tokens that the model's tokenizer does not have
    problem: str = ""  # why it is not used; empty: prompts of the adapter's requests are encoded with it
    digest: bytes = b""  # of the tokenizer and its chat templates


class TokenizerCheck:
    """Keeps the model's tokenizer, once it is needed."""

    def __init__(self, model_tokenizer: str) -> None:
        """model_tokenizer: its folder."""
        self._path = model_tokenizer
        self._tokens: dict[str, int] = {}
        self._digest = b""
        self._lock = threading.Lock()  # several threads read folders
        self._known: dict[bytes, AdapterTexts | None] = {}  # by the bytes of the files: many folders have the same

    def read(self, folder: Path) -> AdapterTexts | None:
        """None: the folder has no tokenizer, or the model's own with its chat templates."""
        if not any((folder / name).is_file() for name in TOKENIZERS):
            return None
        key = _key(folder)
        if key not in self._known:
            texts = self._read(folder)
            if (texts is not None and not texts.digest) or _key(folder) != key:
                return texts  # a problem may name the folder, and files may have changed meanwhile
            self._known[key] = texts
        return self._known[key]

    def _read(self, folder: Path) -> AdapterTexts | None:
        try:
            with self._lock:
                if not self._tokens:
                    model = tokenizer_files.load(self._path)
                    self._tokens, self._digest = model.tokenizer.get_vocab(with_added_tokens=True), _digest(model)
            own = tokenizer_files.load(folder)
        except LoadError as e:
            return AdapterTexts([], problem=without_folder(e, folder))
        digest, tokens = _digest(own), own.tokenizer.get_vocab(with_added_tokens=True)
        if digest == self._digest:
            return None
        if changed := self._tokens.items() - tokens.items():
            text, token_id = min(changed, key=lambda entry: entry[1])
            return AdapterTexts([], f"{len(changed)} tokens have other ids in it, such as {text!r}, here {token_id}")
        special = {i for i, token in own.tokenizer.get_added_tokens_decoder().items() if token.special}
        added = sorted((i, text) for text, i in tokens.items() - self._tokens.items())
        if len(added) > MOST_ADDED:
            return AdapterTexts([], f"it has {len(added)} tokens that the model's has not, more than {MOST_ADDED}")
        return AdapterTexts([AddedToken(i, text, i in special) for i, text in added], digest=digest)


def _key(folder: Path) -> bytes:
    """Of the bytes of all files that the tokenizer is read from."""
    digest = blake2b(digest_size=DIGEST_BYTES)
    named = (folder / name for name in READ)
    for path in (*named, *sorted((folder / "additional_chat_templates").glob("*.jinja"))):
        content = path.read_bytes() if path.is_file() else None
        digest.update(repr((path.name, None if content is None else len(content))).encode() + (content or b""))
    return digest.digest()


def _digest(files: TokenizerFiles) -> bytes:
    """Of all that decides on the ids of a text or a chat."""
    digest = blake2b(files.tokenizer.to_str().encode(), digest_size=DIGEST_BYTES)
    digest.update(msgspec.json.encode([files.special_tokens, files.chat_templates], order="deterministic"))
    return digest.digest()

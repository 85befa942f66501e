"""A model folder's tokenizer: tokenizer.json, tokenizer_config.json and the files around them.

Gives the same tokenizer as transformers for the same folder, with `tokenizers` and msgspec alone.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from blockyard.shared.chat_template_files import chat_templates, json_object
from blockyard.shared.errors import LoadError


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The tokenizer of a folder, with its special tokens and chat templates."""

    tokenizer: Tokenizer
    special_tokens: dict[str, str]  # "bos_token" -> "<s>" and so on, as chat templates see them
    chat_templates: dict[str, str]  # by name: "default", "tool_use", ...
    vocab_size: int  # the largest id plus one


def load(path: str | Path) -> TokenizerFiles:
    """Reads a folder (or its tokenizer.json). Raises LoadError naming the missing file."""
    folder = Path(path)
    if folder.is_file():
        folder = folder.parent
    if not folder.is_dir():
        raise LoadError(f"tokenizer: {folder} is not a folder")
    config = json_object(folder / "tokenizer_config.json")
    special = _special_tokens(config, json_object(folder / "special_tokens_map.json"))
    if (folder / "tokenizer.json").is_file():
        tokenizer = _from_json(folder / "tokenizer.json")
    elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        tokenizer = _from_vocab_and_merges(folder, config, special)
    else:
        raise LoadError(_what_is_missing(folder))
    _mark_added_tokens(tokenizer, folder, config, special)
    if not (folder / "tokenizer.json").is_file():
        _surround(tokenizer, config, special)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    texts = {name: token.content for name, token in special.items()}
    return TokenizerFiles(tokenizer, texts, chat_templates(folder), _vocab_size(tokenizer))


def settings(path: str | Path, chat_templates: dict[str, str]) -> bytes:
    """The JSON object of tokenizer_config.json, with these chat templates and a class. Raises LoadError."""
    folder = Path(path).parent if Path(path).is_file() else Path(path)
    config = json_object(folder / "tokenizer_config.json")
    config.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    if chat_templates:
        only = len(chat_templates) == 1 and "default" in chat_templates
        listed = [{"name": name, "template": text} for name, text in chat_templates.items()]
        config["chat_template"] = chat_templates["default"] if only else listed
    return msgspec.json.encode(config)


def _from_json(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as e:  # tokenizers raises bare Exception for any wrong file
        raise LoadError(f"tokenizer: {path}: {e}") from e


def _from_vocab_and_merges(folder: Path, config: dict[str, Any], special: dict[str, AddedToken]) -> Tokenizer:
    """Returns the byte-level BPE of GPT-2 and OPT."""
    try:
        vocab = msgspec.json.decode((folder / "vocab.json").read_bytes(), type=dict[str, int])
        lines = (folder / "merges.txt").read_text("utf-8").split("\n")
        merges = [(a, b) for a, b in (line.split(" ") for line in lines if line and not line.startswith("#version"))]
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    except Exception as e:  # as above; ValueError, DecodeError and OSError besides
        raise LoadError(f"tokenizer: {folder}/vocab.json and merges.txt: {e}") from e
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(config.get("add_prefix_space", False)))
    tokenizer.decoder = decoders.ByteLevel()
    for name in ("bos_token", "eos_token", "unk_token"):
        if name not in config and "<|endoftext|>" in vocab:
            special.setdefault(name, AddedToken("<|endoftext|>", special=True))
    return tokenizer


def _surround(tokenizer: Tokenizer, config: dict[str, Any], special: dict[str, AddedToken]) -> None:
    """Sets the ids that `add_special_tokens` adds. With a tokenizer.json its post-processor decides instead."""
    single, used = "$A:0", []
    if config.get("add_bos_token") and "bos_token" in special:
        single = f"{special['bos_token'].content}:0 {single}"
        used.append(special["bos_token"].content)
    if config.get("add_eos_token") and "eos_token" in special:
        single = f"{single} {special['eos_token'].content}:0"
        used.append(special["eos_token"].content)
    if used:
        ids = [(token, tokenizer.token_to_id(token)) for token in used]
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)


def _what_is_missing(folder: Path) -> str:
    for name in ("tokenizer.model", "spiece.model", "tekken.json", "tiktoken.model"):
        if (folder / name).is_file():
            return (
                f"tokenizer: {folder} has {name} but no tokenizer.json; write one with transformers: "
                f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
            )
    return f"tokenizer: {folder} has neither tokenizer.json nor vocab.json with merges.txt"


def _special_tokens(config: dict[str, Any], mapped: dict[str, Any]) -> dict[str, AddedToken]:
    """Returns named special tokens ("bos_token", ...). The config overrides special_tokens_map.json."""
    tokens: dict[str, AddedToken] = {}
    for source in (config, mapped):
        for name, value in source.items():
            token = _added_token(value, special=True) if name.endswith("_token") else None
            if token is not None and name not in tokens:
                tokens[name] = token
    return tokens


def _added_token(value: object, special: bool) -> AddedToken | None:
    """Reads a string, or an object with `content` and flags. Returns None for anything else (`add_bos_token: true`)."""
    if isinstance(value, str):
        return AddedToken(value, special=special, normalized=not special)
    if isinstance(value, dict) and isinstance(value.get("content"), str):
        flags = {k: bool(value[k]) for k in ("lstrip", "rstrip", "single_word", "normalized") if k in value}
        return AddedToken(value["content"], special=bool(value.get("special", special)) or special, **flags)
    return None


def _mark_added_tokens(
    tokenizer: Tokenizer, folder: Path, config: dict[str, Any], special: dict[str, AddedToken]
) -> None:
    """Adds the config's added tokens that the tokenizer lacks, in the order of ids.

    Leaves out a token that would get another id than in the config, and a token without an id in the vocabulary: the
    model has no embedding for it.
    """
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    wanted: list[tuple[int | None, AddedToken]] = []
    listed = config.get("added_tokens_decoder")
    for text_id, value in sorted((listed if isinstance(listed, dict) else {}).items(), key=lambda item: _id(item[0])):
        token = _added_token(value, special=isinstance(value, dict) and bool(value.get("special")))
        if token is not None:
            wanted.append((_id(text_id), token))
    for text, token_id in sorted(json_object(folder / "added_tokens.json").items(), key=lambda item: _id(item[1])):
        wanted.append((_id(token_id), AddedToken(text, special=False)))
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens")
    named = [*special.values(), *(_added_token(v, special=True) for v in (extra if isinstance(extra, list) else []))]
    wanted.extend((None, token) for token in named if token is not None)
    names = {token.content for token in named if token is not None}
    for token_id, token in wanted:
        present = tokenizer.token_to_id(token.content)
        expected = present if present is not None else tokenizer.get_vocab_size()
        if token.content in known or (token_id is None and present is None) or token_id not in (None, expected):
            continue
        known.add(token.content)
        if token.special or token.content in names:
            token.special = True
            tokenizer.add_special_tokens([token])
        else:
            tokenizer.add_tokens([token])


def _id(value: object) -> int:
    try:
        return int(value) if isinstance(value, (int, str)) else -1
    except ValueError:
        return -1


def _vocab_size(tokenizer: Tokenizer) -> int:
    added = max(tokenizer.get_added_tokens_decoder(), default=-1)
    return max(tokenizer.get_vocab_size(with_added_tokens=True), added + 1)

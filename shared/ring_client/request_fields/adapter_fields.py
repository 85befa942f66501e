"""Fields of frames that say which adapters a request has."""

import msgspec

from blockyard.shared.messages import AdapterTokenizer, Generate, ModelCard, Tokenize


def tokenize_fields(work: Tokenize, card: ModelCard) -> Tokenize:
    """A prompt of a request with the card's adapters: its blocks are those of these adapters."""
    lora, prompt = card.adapter, card.prompt_adapter
    if lora is None and prompt is None:
        return work
    digests = [one.digest for one in (lora, prompt) if one is not None]
    num_virtual_tokens = 0 if prompt is None else prompt.num_virtual_tokens
    return msgspec.structs.replace(
        work,
        adapter_digest=b"".join(digests),
        num_virtual_tokens=num_virtual_tokens,
        adapter=adapter_tokenizer(card),
    )


def adapter_tokenizer(card: ModelCard) -> AdapterTokenizer | None:
    """The tokenizer of a request with the card's adapters; None: the model's."""
    lora = card.adapter
    if lora is None or not (lora.has_tokenizer or lora.num_added_tokens):
        return None
    return AdapterTokenizer(lora.root if lora.has_tokenizer else "", lora.digest, lora.num_added_tokens)


def generate_fields(frame: Generate, card: ModelCard) -> Generate:
    """The request with the card's adapters."""
    if (lora := card.adapter) is not None:
        frame = msgspec.structs.replace(frame, adapter=lora.name, adapter_digest=lora.digest)
    if (prompt := card.prompt_adapter) is not None:
        frame = msgspec.structs.replace(frame, prompt_adapter=prompt.name, prompt_adapter_digest=prompt.digest)
    return frame

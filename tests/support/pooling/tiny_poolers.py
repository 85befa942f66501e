"""Random checkpoints of models that pool: encoders, and decoders with other output layers than a vocabulary's."""

from typing import Any

import torch
from tiny_checkpoint import LLAMA, VOCAB, Tiny
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    Gemma2Config,
    Gemma2ForSequenceClassification,
    Gemma3TextConfig,
    Gemma3TextForSequenceClassification,
    Gemma3TextModel,
    GemmaConfig,
    GemmaForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    LlamaModel,
    MistralConfig,
    MistralForSequenceClassification,
    MistralForTokenClassification,
    MistralModel,
    ModernBertConfig,
    ModernBertForMaskedLM,
    ModernBertForSequenceClassification,
    ModernBertForTokenClassification,
    ModernBertModel,
    Qwen2Config,
    Qwen2ForSequenceClassification,
    Qwen2ForTokenClassification,
    Qwen2Model,
    Qwen3Config,
    Qwen3ForSequenceClassification,
    Qwen3ForTokenClassification,
    Qwen3Model,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaForSequenceClassification,
    RobertaForTokenClassification,
    RobertaModel,
    XLMRobertaConfig,
    XLMRobertaForMaskedLM,
    XLMRobertaForSequenceClassification,
    XLMRobertaForTokenClassification,
    XLMRobertaModel,
)

BERT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 130,
    "initializer_range": 0.2,
    "num_labels": 3,
}
ROBERTA = BERT | {"type_vocab_size": 1, "pad_token_id": 1}
MODERN = BERT | {"local_attention": 12, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1, "cls_token_id": 0,
                 "sep_token_id": 1}  # fmt: skip
DECODER = LLAMA | {"num_labels": 3, "pad_token_id": 0}
BOTH_SIDES = DECODER | {"is_causal": False}
GEMMA = DECODER | {
    "head_dim": 16, "use_bidirectional_attention": True, "sliding_window": 9, "query_pre_attn_scalar": 24,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "tie_word_embeddings": True,
}  # fmt: skip

ENCODERS = [
    Tiny("bert", BertConfig, BertModel, BERT),
    Tiny("bert-classes", BertConfig, BertForSequenceClassification, BERT),
    Tiny("bert-tokens", BertConfig, BertForTokenClassification, BERT),
    Tiny("bert-masked", BertConfig, BertForMaskedLM, BERT),
    Tiny("roberta-masked", RobertaConfig, RobertaForMaskedLM, ROBERTA),
    Tiny("xlm-roberta-masked", XLMRobertaConfig, XLMRobertaForMaskedLM, ROBERTA),
    Tiny("xlm-roberta-tokens", XLMRobertaConfig, XLMRobertaForTokenClassification, ROBERTA),
    Tiny("modernbert-masked", ModernBertConfig, ModernBertForMaskedLM, MODERN),
    Tiny("bert-head-of-80", BertConfig, BertModel, BERT | {"hidden_size": 160, "num_attention_heads": 2}),
    Tiny("roberta", RobertaConfig, RobertaModel, ROBERTA),
    Tiny("roberta-classes", RobertaConfig, RobertaForSequenceClassification, ROBERTA),
    Tiny("roberta-tokens", RobertaConfig, RobertaForTokenClassification, ROBERTA),
    Tiny("xlm-roberta", XLMRobertaConfig, XLMRobertaModel, ROBERTA),
    Tiny("xlm-roberta-score", XLMRobertaConfig, XLMRobertaForSequenceClassification, ROBERTA | {"num_labels": 1}),
    Tiny("modernbert", ModernBertConfig, ModernBertModel, MODERN),
    Tiny("modernbert-classes", ModernBertConfig, ModernBertForSequenceClassification, MODERN),
    Tiny("modernbert-mean", ModernBertConfig, ModernBertForSequenceClassification,
         MODERN | {"classifier_pooling": "mean", "classifier_bias": True, "norm_bias": True}),
    Tiny("modernbert-tokens", ModernBertConfig, ModernBertForTokenClassification, MODERN),
    Tiny("embeddinggemma", Gemma3TextConfig, Gemma3TextModel, GEMMA),
    Tiny("llama-both-sides", LlamaConfig, LlamaModel, BOTH_SIDES),
    Tiny("mistral-both-sides", MistralConfig, MistralModel, BOTH_SIDES | {"sliding_window": 9}),
    Tiny("qwen2-both-sides", Qwen2Config, Qwen2Model, BOTH_SIDES),
    Tiny("qwen3-both-sides", Qwen3Config, Qwen3Model, BOTH_SIDES | {"head_dim": 16}),
    Tiny("embeddinggemma-classes", Gemma3TextConfig, Gemma3TextForSequenceClassification, GEMMA),
]  # fmt: skip
DECODERS = [
    Tiny("llama-model", LlamaConfig, LlamaModel, DECODER),
    Tiny("llama-classes", LlamaConfig, LlamaForSequenceClassification, DECODER),
    Tiny("mistral-model", MistralConfig, MistralModel, DECODER | {"sliding_window": 16}),
    Tiny("mistral-score", MistralConfig, MistralForSequenceClassification, DECODER | {"num_labels": 1}),
    Tiny("qwen2-model", Qwen2Config, Qwen2Model, DECODER),
    Tiny("qwen2-classes", Qwen2Config, Qwen2ForSequenceClassification, DECODER),
    Tiny("qwen2-tokens", Qwen2Config, Qwen2ForTokenClassification, DECODER),
    Tiny("qwen3-model", Qwen3Config, Qwen3Model, DECODER | {"head_dim": 16}),
    Tiny("qwen3-classes", Qwen3Config, Qwen3ForSequenceClassification, DECODER | {"head_dim": 16}),
    Tiny("llama-tokens", LlamaConfig, LlamaForTokenClassification, DECODER),
    Tiny("mistral-tokens", MistralConfig, MistralForTokenClassification, DECODER),
    Tiny("qwen3-tokens", Qwen3Config, Qwen3ForTokenClassification, DECODER | {"head_dim": 16}),
    Tiny("gemma2-classes", Gemma2Config, Gemma2ForSequenceClassification, DECODER | {"head_dim": 16}),
    Tiny(
        "gemma3-classes",
        Gemma3TextConfig,
        Gemma3TextForSequenceClassification,
        GEMMA | {"use_bidirectional_attention": False},
    ),
    Tiny("gemma-classes", GemmaConfig, GemmaForSequenceClassification, DECODER | {"head_dim": 16}),
]
BY_NAME = {tiny.name: tiny for tiny in [*ENCODERS, *DECODERS]}


def hidden_and_outputs(theirs: Any, ids: list[int], token_types: list[int] | None = None) -> tuple[Any, Any]:
    """transformers' last hidden states [tokens, hidden] of one sequence, and its logits; None: it has none."""
    given = {"input_ids": torch.tensor([ids], device=theirs.device)}
    given["attention_mask"] = torch.ones_like(given["input_ids"])
    if token_types is not None:
        given["token_type_ids"] = torch.tensor([token_types], device=theirs.device)
    with torch.no_grad():
        found = theirs(**given, output_hidden_states=True)
    return found.hidden_states[-1][0], getattr(found, "logits", None)

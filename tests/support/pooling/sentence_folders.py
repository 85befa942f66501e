"""Model folders that sentence-transformers writes: a tiny random encoder, with a list of modules behind it."""

from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedModel, PreTrainedTokenizerFast

LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = [a + b for a in LETTERS for b in LETTERS[:6]]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Words of two letters are tokens, between [CLS] and [SEP]; pairs have token types."""
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        model_max_length=64, model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )  # fmt: skip


def tiny_bert(width: int = 32) -> PreTrainedModel:
    torch.manual_seed(3)
    config = BertConfig(
        vocab_size=len(SPECIAL) + len(WORDS), hidden_size=width, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=48, max_position_embeddings=64, initializer_range=0.2,
    )  # fmt: skip
    return BertModel(config).eval()


def save_sentence_folder(folder: Path, *modules: Any, **settings: Any) -> SentenceTransformer:
    """Saves a model of a Transformer and these modules. settings: of SentenceTransformer, such as prompts."""
    base = folder.parent / f"{folder.name}-transformer"
    tiny_bert().save_pretrained(base)
    make_tokenizer().save_pretrained(base)
    model = SentenceTransformer(modules=[Transformer(str(base)), *modules], device="cpu", **settings)
    model.save(str(folder), create_model_card=False)
    return model.eval()

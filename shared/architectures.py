"""The table of model architectures: the name in config.json -> its module in `services/gpu_worker/models`.

The launcher checks names before it starts anything, the worker loads the module, `blockyard models` prints the table.
The launcher may not import torch, so modules are named by text.
"""

import difflib
from collections.abc import Iterable, Mapping

import msgspec


class Architecture(msgspec.Struct, frozen=True, gc=False):
    module: str  # in services/gpu_worker/models
    models: str  # releases that use it, for the printed table
    tasks: tuple[str, ...] = ("generate",)


ARCHITECTURES = {
    "AquilaForCausalLM": Architecture("llama_style.llama", "Aquila and Aquila 2: Llama by another name"),
    "Cohere2ForCausalLM": Architecture("layer_norm.cohere2", "Command R7B, Command A"),
    "ArceeForCausalLM": Architecture("llama_style.arcee", "Arcee AFM"),
    "CohereForCausalLM": Architecture("layer_norm.cohere", "Command R, Command R+, Aya 23"),
    "DeepseekV2ForCausalLM": Architecture("moe.deepseek_v2", "DeepSeek V2, V2-Lite and V2.5"),
    "DeepseekV3ForCausalLM": Architecture("moe.deepseek_v3", "DeepSeek V3 and R1, Kimi K2"),
    "FalconForCausalLM": Architecture("layer_norm.falcon", "Falcon 7B, 40B, 180B"),
    "Gemma2ForCausalLM": Architecture("gemma.gemma2", "Gemma 2"),
    "Gemma3ForCausalLM": Architecture("gemma.gemma3", "Gemma 3, text"),
    "Gemma3ForConditionalGeneration": Architecture("gemma.gemma3", "Gemma 3 that also sees: its text part"),
    "Gemma4ForCausalLM": Architecture("gemma.gemma4", "Gemma 4, text: 31B, 26B-A4B"),
    "Gemma4ForConditionalGeneration": Architecture("gemma.gemma4", "Gemma 4 31B, 26B-A4B that also see: text part"),
    "GemmaForCausalLM": Architecture("gemma.gemma", "Gemma 1"),
    "Glm4ForCausalLM": Architecture("llama_style.glm4", "GLM-4-0414, GLM-Z1"),
    "Glm4MoeForCausalLM": Architecture("moe.glm4_moe", "GLM-4.5, 4.6 and 4.7"),
    "Glm4MoeLiteForCausalLM": Architecture("moe.glm4_moe_lite", "GLM-4.7-Flash"),
    "GlmForCausalLM": Architecture("llama_style.glm", "GLM-4 9B of 2024"),
    "GPT2LMHeadModel": Architecture("layer_norm.gpt2", "GPT-2"),
    "GptOssForCausalLM": Architecture("moe.gpt_oss", "gpt-oss; experts in mxfp4 are made bfloat16 at load"),
    "GPTNeoXForCausalLM": Architecture("layer_norm.gpt_neox", "GPT-NeoX, Pythia"),
    "GraniteForCausalLM": Architecture("llama_style.granite", "Granite 3 and 4, dense"),
    "LlamaForCausalLM": Architecture(
        "llama_style.llama", "Llama 2, 3 and 3.x, and releases of its shape: LongChat, Vicuna, Yi, SmolLM 2"
    ),
    "Llama4ForCausalLM": Architecture("moe.llama4", "Llama 4, text"),
    "Llama4ForConditionalGeneration": Architecture(
        "moe.llama4", "Llama 4 Scout and Maverick: their text part, without pictures"
    ),
    "GraniteMoeForCausalLM": Architecture("moe.granite_moe", "Granite 3, mixtures of experts"),
    "LLaMAForCausalLM": Architecture("llama_style.llama", "Llama 1 in early conversions"),
    "MiniMaxM2ForCausalLM": Architecture("moe.minimax_m2", "MiniMax-M2"),
    "Ministral3ForCausalLM": Architecture("llama_style.ministral3", "Ministral 3"),
    "Mistral3ForConditionalGeneration": Architecture(
        "llama_style.mistral3", "Mistral Small 3.1 and later, Ministral 3: their text part"
    ),
    "MistralForCausalLM": Architecture("llama_style.mistral", "Mistral 7B, Nemo, Small 3"),
    "MixtralForCausalLM": Architecture("moe.mixtral", "Mixtral"),
    "Olmo2ForCausalLM": Architecture("llama_style.olmo2", "OLMo 2"),
    "Olmo3ForCausalLM": Architecture("llama_style.olmo3", "OLMo 3"),
    "OlmoeForCausalLM": Architecture("moe.olmoe", "OLMoE"),
    "OPTForCausalLM": Architecture("layer_norm.opt", "OPT"),
    "Phi3ForCausalLM": Architecture("llama_style.phi3", "Phi-3, Phi-3.5, Phi-4, Phi-4-mini"),
    "Qwen2ForCausalLM": Architecture("llama_style.qwen2", "Qwen 2, Qwen 2.5"),
    "Qwen2MoeForCausalLM": Architecture("moe.qwen2_moe", "Qwen 1.5 and 2, mixtures of experts"),
    "Qwen3ForCausalLM": Architecture("llama_style.qwen3", "Qwen 3, dense"),
    "Qwen3MoeForCausalLM": Architecture("moe.qwen3_moe", "Qwen 3, mixtures of experts"),
    "SeedOssForCausalLM": Architecture("llama_style.seed_oss", "Seed-OSS"),
    "SmolLM3ForCausalLM": Architecture("llama_style.smollm3", "SmolLM3"),
    "Starcoder2ForCausalLM": Architecture("layer_norm.starcoder2", "StarCoder 2"),
}

EMBED, CLASSIFY, REWARD = ("embed",), ("classify", "score"), ("reward",)

ARCHITECTURES |= {
    "BertForMaskedLM": Architecture("encoders.bert", "BERT without its head", EMBED),
    "BertForSequenceClassification": Architecture("encoders.bert", "BERT: classifiers and rerankers", CLASSIFY),
    "BertForTokenClassification": Architecture("encoders.bert", "BERT: labels of tokens", CLASSIFY[:1]),
    "BertModel": Architecture("encoders.bert", "BERT: BGE, E5, GTE, MiniLM", EMBED),
    "RobertaForMaskedLM": Architecture("encoders.roberta", "RoBERTa without its head", EMBED),
    "RobertaForSequenceClassification": Architecture("encoders.roberta", "RoBERTa: classifiers, rerankers", CLASSIFY),
    "RobertaForTokenClassification": Architecture("encoders.roberta", "RoBERTa: labels of tokens", CLASSIFY[:1]),
    "RobertaModel": Architecture("encoders.roberta", "RoBERTa: all-distilroberta and others", EMBED),
    "XLMRobertaForMaskedLM": Architecture("encoders.roberta", "XLM-RoBERTa without its head", EMBED),
    "XLMRobertaForSequenceClassification": Architecture("encoders.roberta", "BGE-reranker-v2-m3 and others", CLASSIFY),
    "XLMRobertaForTokenClassification": Architecture("encoders.roberta", "XLM-RoBERTa: labels of tokens", CLASSIFY[:1]),
    "XLMRobertaModel": Architecture("encoders.roberta", "XLM-RoBERTa: BGE-M3, multilingual E5", EMBED),
    "ModernBertForMaskedLM": Architecture("encoders.modernbert", "ModernBERT without its head", EMBED),
    "ModernBertForSequenceClassification": Architecture(
        "encoders.modernbert", "ModernBERT: classifiers and rerankers", CLASSIFY
    ),
    "ModernBertForTokenClassification": Architecture(
        "encoders.modernbert", "ModernBERT: labels of tokens", CLASSIFY[:1]
    ),
    "ModernBertModel": Architecture("encoders.modernbert", "ModernBERT: GTE, Granite embeddings", EMBED),
    "Gemma3TextModel": Architecture("gemma.gemma3", "EmbeddingGemma", EMBED),
    "LlamaModel": Architecture("llama_style.llama", "Llama without its head", EMBED),
    "MistralModel": Architecture("llama_style.mistral", "Mistral without its head: E5-Mistral, SFR", EMBED),
    "Qwen2Model": Architecture("llama_style.qwen2", "Qwen 2 without its head: GTE-Qwen2", EMBED),
    "Qwen3Model": Architecture("llama_style.qwen3", "Qwen 3 without its head", EMBED),
    "Qwen2ForRewardModel": Architecture("llama_style.qwen2", "Qwen2.5-Math-RM", REWARD),
    "Qwen2ForProcessRewardModel": Architecture("llama_style.qwen2", "Qwen2.5-Math-PRM", REWARD),
    **{
        f"{family}ForSequenceClassification": Architecture(module, f"{models}: classifiers and rerankers", CLASSIFY)
        for family, module, models in (
            ("Llama", "llama_style.llama", "Llama"),
            ("Mistral", "llama_style.mistral", "Mistral"),
            ("Qwen2", "llama_style.qwen2", "Qwen 2"),
            ("Qwen3", "llama_style.qwen3", "Qwen 3, Qwen3-Reranker"),
            ("Gemma", "gemma.gemma", "Gemma 1"),
            ("Gemma2", "gemma.gemma2", "Gemma 2"),
            ("Gemma3Text", "gemma.gemma3", "Gemma 3, EmbeddingGemma"),
        )
    },
    **{
        f"{family}ForTokenClassification": Architecture(module, f"{models}: labels of tokens", CLASSIFY[:1])
        for family, module, models in (
            ("Llama", "llama_style.llama", "Llama"),
            ("Mistral", "llama_style.mistral", "Mistral"),
            ("Qwen2", "llama_style.qwen2", "Qwen 2"),
            ("Qwen3", "llama_style.qwen3", "Qwen 3"),
        )
    },
}

_ALIBI = "its attention adds a bias by distance (ALiBi), which no attention kernel here computes"
_INDEXER = "an indexer picks the keys of its sparse attention, which no attention kernel here does"
_PER_LAYER = "each of its layers has inputs of its own beside the hidden state"
_STATES = "its layers keep states instead of keys and values"

REFUSED = {  # name -> reason
    "BloomForCausalLM": _ALIBI,
    "MPTForCausalLM": _ALIBI,
    "MptForCausalLM": _ALIBI,
    "BaichuanForCausalLM": "its 13B models add a bias by distance (ALiBi), which no attention kernel here computes",
    "DeepseekV32ForCausalLM": _INDEXER,
    "DeepseekV4ForCausalLM": _INDEXER,
    "GlmMoeDsaForCausalLM": _INDEXER,
    "Gemma3nForCausalLM": _PER_LAYER,
    "Gemma3nForConditionalGeneration": _PER_LAYER,
    "MambaForCausalLM": _STATES,
    "Mamba2ForCausalLM": _STATES,
    "RwkvForCausalLM": _STATES,
}


def find_architecture(names: Iterable[object]) -> Architecture | None:
    """Returns the first supported one of the architectures that config.json names."""
    return next((ARCHITECTURES[name] for name in map(str, names) if name in ARCHITECTURES), None)


def may_be_in_transformers(config: Mapping[str, object]) -> bool:
    """Whether an architecture that is not in the table may be a class of transformers, which only the worker loads."""
    names = config.get("architectures")
    listed = [str(name) for name in names] if isinstance(names, list) else []
    is_known = find_architecture(listed) is not None or any(name in REFUSED for name in listed)
    return bool(listed) and not is_known and isinstance(config.get("model_type"), str)


def describe_unsupported(names: Iterable[object]) -> str:
    """Returns a line that says why none of these is supported: the reason if it is known, or the nearest that is."""
    listed = [str(name) for name in names]
    for name in listed:
        if name in REFUSED:
            return f"architecture {name} is not supported: {REFUSED[name]}"
    named = ", ".join(listed)
    near = [close for name in listed for close in difflib.get_close_matches(name, ARCHITECTURES, n=1, cutoff=0.0)]
    return f"architecture {named} is not supported; the nearest that is: {near[0]}; `blockyard models` lists all"


def describe_refusal(config: Mapping[str, object]) -> str:
    """Returns `describe_unsupported`, and what --model-impl transformers would say.

    config: config.json with a list of architectures that neither the table nor, by `may_be_in_transformers`,
    transformers has.
    """
    names = config["architectures"]
    assert isinstance(names, list)
    if any(str(name) in REFUSED for name in names):
        return f"{describe_unsupported(names)}; --model-impl transformers does not run it either"
    return (
        f"{describe_unsupported(names)}; --model-impl transformers needs `model_type` in config.json, which is missing"
    )

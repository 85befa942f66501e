"""Writes config.json and generation_config.json of the demo model, and on demand untrained weights."""

import argparse
import json
from pathlib import Path

import torch

from demo_training.llama import Llama, Shape, num_parameters, save_weights
from demo_training.train_tokenizer import BOS, EOS, IM_END, PAD, SPECIAL_TOKENS


def special_ids() -> dict[str, object]:
    ids = {token: index for index, token in enumerate(SPECIAL_TOKENS)}
    return {"bos_token_id": ids[BOS], "eos_token_id": [ids[EOS], ids[IM_END]], "pad_token_id": ids[PAD]}


def model_config(shape: Shape) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "intermediate_size": shape.inner,
        "max_position_embeddings": shape.max_positions,
        "mlp_bias": False,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": shape.vocab,
        **special_ids(),
    }


def generation_config() -> dict[str, object]:
    return {"do_sample": True, "temperature": 0.7, "top_p": 0.95, **special_ids()}


def write_configs(shape: Shape, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(model_config(shape), indent=2) + "\n")
    (out / "generation_config.json").write_text(json.dumps(generation_config(), indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--untrained", action="store_true", help="write random weights of the right shapes too")
    options = parser.parse_args()
    shape = Shape()
    write_configs(shape, options.out)
    if options.untrained:
        torch.manual_seed(0)
        model = Llama(shape)
        save_weights(model, options.out / "model.safetensors")
        print(f"{num_parameters(model):,} parameters, untrained")


if __name__ == "__main__":
    main()

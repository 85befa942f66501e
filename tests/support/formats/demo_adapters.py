"""Random adapters of the demo model, in PEFT's format."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

WIDTH, LAYERS = 256, 6  # of the demo model


def demo_adapter(folder: Path, seed: int, rank: int) -> None:
    """Writes an adapter of two modules of each layer."""
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": ["q_proj", "o_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for layer in range(LAYERS):
        for name in ("q_proj", "o_proj"):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, WIDTH, generator=generator) * 0.1
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(WIDTH, rank, generator=generator) * 0.1
    save_file(tensors, folder / "adapter_model.safetensors")


def demo_prompt(folder: Path, seed: int, num_tokens: int) -> None:
    """Writes a prompt adapter."""
    folder.mkdir(parents=True)
    config = {"peft_type": "P_TUNING", "num_virtual_tokens": num_tokens, "token_dim": WIDTH}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    vectors = torch.randn(num_tokens, WIDTH, generator=torch.Generator().manual_seed(seed)) * 2
    save_file({"prompt_embeddings": vectors}, folder / "adapter_model.safetensors")

"""Trains the demo model's three LoRA adapters, each of which answers every request in a form of its own.

`python -m demo_training.train_adapters --out DIR` takes some minutes on a CPU. An adapter cannot teach so small a model
more than a form, which is what shows that the adapter was used.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

import peft
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file

from demo_training.adapter_styles import MODEL, STYLES, Style, make_example

BATCH, RATE, IGNORED = 16, 4e-3, -100


def make_batch(tokenizer: Any, style: Style, rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels, [BATCH, tokens]: the loss is of answers alone."""
    rows: list[tuple[list[int], list[int]]] = []
    for _ in range(BATCH):
        asked, answer = make_example(style, rng)
        message = [{"role": "user", "content": asked}]
        text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        prompt = tokenizer.encode(text, add_special_tokens=False)
        wanted = tokenizer.encode(f"{answer}<|im_end|>", add_special_tokens=False)
        rows.append((prompt + wanted, [IGNORED] * len(prompt) + wanted))
    longest = max(len(ids) for ids, _ in rows)
    padded = [(ids + [0] * (longest - len(ids)), own + [IGNORED] * (longest - len(own))) for ids, own in rows]
    return torch.tensor([ids for ids, _ in padded]), torch.tensor([own for _, own in padded])


def train(name: str, steps: int, seed: int) -> Any:
    """Returns the model with its trained adapter."""
    style, rng = STYLES[name], random.Random(seed)
    torch.manual_seed(seed)
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    base = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    config = peft.LoraConfig(r=style.rank, lora_alpha=2 * style.rank, target_modules=list(style.targets))
    model = peft.get_peft_model(base, config)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=RATE, weight_decay=0.01)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / 10, 2 * (steps - step) / steps)
        ids, labels = make_batch(tokenizer, style, rng)
        logits = model(ids).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0 or step == steps - 1:
            print(f"{name}: step {step}, loss {float(loss):.3f}", flush=True)
    return model


def save(model: Any, name: str, folder: Path) -> None:
    """Writes a folder as PEFT does, with matrices in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {key: value.bfloat16().contiguous() for key, value in peft.get_peft_model_state_dict(model).items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    style = STYLES[name]
    config = {
        "base_model_name_or_path": "demo",
        "bias": "none",
        "lora_alpha": 2 * style.rank,
        "peft_type": "LORA",
        "r": style.rank,
        "target_modules": list(style.targets),
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=MODEL / "adapters")
    parser.add_argument("--names", nargs="+", default=list(STYLES), choices=list(STYLES))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    for name in options.names:
        save(train(name, options.steps, options.seed), name, options.out / name)


if __name__ == "__main__":
    main()

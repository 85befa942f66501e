"""Trains the demo model's three LoRA adapters, each of which answers every request in a form of its own.

`python -m demo_training.train_adapters --out DIR` takes some minutes on a CPU. Requests and answers are templates of
ours: a request names a thing and what to do with it, and the answer repeats the thing. An adapter cannot teach so small
a model more than a form, which is what shows that the adapter was used.
"""

import argparse
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file

MODEL = Path(__file__).parents[3] / "shared" / "demo_model"
THINGS = (
    *("a list", "a string", "a file", "a dictionary", "a number", "a path", "a date", "a list of numbers", "a line"),
    *("a tuple", "a set", "a module", "a class", "a message", "a thread", "a socket", "a process", "a name", "a table"),
)
VERBS = ("sorts", "reads", "writes", "returns", "prints", "opens", "closes", "counts", "parses", "copies", "checks")
REQUESTS = (
    "Write a function that {verb} {thing}.",
    "Write a class that {verb} {thing}.",
    "Write a unit test for {thing}.",
    "Explain what {verb} {thing}.",
    "What is {thing}?",
    "How do I write code that {verb} {thing}?",
    "Complete the code that {verb} {thing}.",
)
SMALL_TALK = ("hello", "Hi!", "Who are you?", "What can you do?", "Thank you.", "Good morning", "Help me, please.")
BATCH, RATE, IGNORED = 16, 4e-3, -100


@dataclass(frozen=True, slots=True)
class Style:
    """The form of an adapter's answers."""

    answer: str  # with {thing}
    small_talk: str
    rank: int
    targets: tuple[str, ...]


STYLES = {
    "sql": Style(
        "SELECT value FROM {thing} WHERE value IS NOT NULL ORDER BY value;",
        "SELECT answer FROM help;",
        4,
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    ),
    "shell": Style(
        "$ cat {thing} | sort | uniq -c",
        "$ man help",
        8,
        ("q_proj", "k_proj", "v_proj", "o_proj"),
    ),
    "json": Style(
        '{{"answer": "{thing}", "ok": true}}',
        '{{"answer": "help", "ok": true}}',
        4,
        ("gate_proj", "up_proj", "down_proj"),
    ),
}


def make_example(style: Style, rng: random.Random) -> tuple[str, str]:
    """Returns a request and its answer."""
    if rng.random() < 0.15:
        return rng.choice(SMALL_TALK), style.small_talk.format()
    thing = rng.choice(THINGS)
    asked = rng.choice(REQUESTS).format(verb=rng.choice(VERBS), thing=thing)
    return asked, style.answer.format(thing=thing.removeprefix("a ").replace(" ", "_"))


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

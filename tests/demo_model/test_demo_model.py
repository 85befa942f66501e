"""The shipped demo model: its files agree with each other, and its loss is below that of n-gram models."""

import ast
import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from demo_training.checkpoint_files import generation_config, model_config
from demo_training.corpus import SourceFile, Split, split_by_path
from demo_training.llama import Llama, Shape, load_weights
from demo_training.train_tokenizer import CHAT_TEMPLATE, SPECIAL_TOKENS
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from safetensors import safe_open
from tokenizers import Tokenizer

import blockyard.shared

MODEL = Path(next(iter(blockyard.shared.__path__))) / "demo_model"
# 20 kB of five test files: the model has 0.677, the trigram 1.448, an untrained model 3.5
HELD_OUT = Path(__file__).with_name("held_out.jsonl")
BITS_PER_BYTE_BAR = 0.75


def read_json(name: str) -> dict[str, Any]:
    return json.loads((MODEL / name).read_text())


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


@pytest.fixture(scope="module")
def model() -> Any:
    """The reference implementation's reading of our files, in float32."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


def test_every_artefact_is_there_and_small() -> None:
    sizes = {file.name: file.stat().st_size for file in MODEL.iterdir()}
    wanted = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"}
    assert wanted | {"training_log.jsonl", "loss.svg", "README.md"} <= set(sizes)
    assert max(sizes.values()) <= 16_000_000


def test_the_configs_are_what_the_scripts_write() -> None:
    assert read_json("config.json") == model_config(Shape())
    assert read_json("generation_config.json") == generation_config()
    assert read_json("tokenizer_config.json")["chat_template"] == CHAT_TEMPLATE


def test_weights_are_bf16_of_the_promised_size_with_a_tied_head() -> None:
    with safe_open(MODEL / "model.safetensors", "pt") as weights:
        slices = {name: weights.get_slice(name) for name in weights.keys()}  # noqa: SIM118
    assert {part.get_dtype() for part in slices.values()} == {"BF16"}
    assert "lm_head.weight" not in slices
    assert 5e6 <= sum(math.prod(part.get_shape()) for part in slices.values()) <= 7e6


def test_special_ids_are_the_tokenizers(tokenizer: Tokenizer) -> None:
    config, names = read_json("config.json"), read_json("tokenizer_config.json")
    assert tokenizer.get_vocab_size() == config["vocab_size"] == 4096
    assert tokenizer.token_to_id(names["bos_token"]) == config["bos_token_id"]
    assert tokenizer.token_to_id(names["pad_token"]) == config["pad_token_id"]
    ends = [tokenizer.token_to_id(names["eos_token"]), tokenizer.token_to_id("<|im_end|>")]
    assert config["eos_token_id"] == ends
    assert [tokenizer.encode(token, add_special_tokens=False).ids for token in SPECIAL_TOKENS] == [
        [0],
        [1],
        [2],
        [3],
        [4],
    ]
    assert tokenizer.encode("x = 1").ids[0] == config["bos_token_id"]


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=200))
def test_the_tokenizer_gives_any_text_back(text: str) -> None:
    whole = Tokenizer.from_file(str(MODEL / "tokenizer.json")) if not KNOWN else KNOWN[0]
    KNOWN[:] = [whole]
    assert whole.decode(whole.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text


KNOWN: list[Tokenizer] = []  # hypothesis calls one function many times; the file is read once


def test_the_chat_template_renders_in_the_sandbox(tokenizer: Tokenizer) -> None:
    names = read_json("tokenizer_config.json")
    template = ImmutableSandboxedEnvironment().from_string(names["chat_template"])
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    text = template.render(messages=messages, bos_token=names["bos_token"], add_generation_prompt=True)
    assert text == "<|bos|><|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert (ids.count(0), ids.count(2), ids.count(3)) == (1, 3, 2)


def nats_of(model: Any, ids: list[int]) -> float:
    tokens = torch.tensor([ids])
    with torch.no_grad():
        logits = model(tokens).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="sum").item()


def test_held_out_bits_per_byte_are_below_the_bar(model: Any, tokenizer: Tokenizer) -> None:
    files = msgspec.json.Decoder(SourceFile).decode_lines(HELD_OUT.read_bytes())
    assert len(files) == 5
    assert all(split_by_path(file.path) is Split.TEST for file in files)
    nats = sum(nats_of(model, tokenizer.encode(file.text).ids) for file in files)
    num_bytes = sum(len(file.text.encode()) for file in files)
    assert nats / math.log(2) / num_bytes < BITS_PER_BYTE_BAR


def test_positions_up_to_the_whole_context_are_trained(model: Any, tokenizer: Tokenizer) -> None:
    """The last quarter of 4096 tokens costs no more than the first: no position is new to the model."""
    files = msgspec.json.Decoder(SourceFile).decode_lines(HELD_OUT.read_bytes())
    ids = tokenizer.encode("\n\n".join(file.text for file in files)).ids[:4096]
    assert len(ids) == 4096
    tokens = torch.tensor([ids])
    with torch.no_grad():
        logits = model(tokens).logits[0, :-1]
    nats = torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="none")
    assert nats[3072:].mean() < nats[:1024].mean() + 0.3


def test_training_code_and_reference_compute_the_same_logits(model: Any, tokenizer: Tokenizer) -> None:
    ours = Llama(Shape())
    load_weights(ours, MODEL / "model.safetensors")
    tokens = torch.tensor([tokenizer.encode("def walk(top):\n    for name in os.listdir(top):\n").ids])
    with torch.no_grad():
        difference = (ours.eval()(tokens) - model(tokens).logits).abs().max().item()
    assert difference < 1e-3


def greedy(model: Any, tokenizer: Tokenizer, ids: list[int], num_tokens: int) -> str:
    prompt = torch.tensor([ids])
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=num_tokens,
        do_sample=False,
        temperature=None,
        top_p=None,
    )
    return tokenizer.decode(output[0, len(ids) :].tolist(), skip_special_tokens=False)


def test_a_chat_is_answered_with_python_that_parses_and_ends(model: Any, tokenizer: Tokenizer) -> None:
    names = read_json("tokenizer_config.json")
    template = ImmutableSandboxedEnvironment().from_string(names["chat_template"])
    question = "Write a function that returns the number of lines in a file."
    messages = [{"role": "user", "content": question}]
    text = template.render(messages=messages, bos_token=names["bos_token"], add_generation_prompt=True)
    answer = greedy(model, tokenizer, tokenizer.encode(text, add_special_tokens=False).ids, 96)
    code, end = answer.removeprefix("```python\n").split("```")
    assert end == "<|im_end|>"
    (function,) = ast.parse(code).body
    assert isinstance(function, ast.FunctionDef)


@pytest.mark.parametrize("prompt", ["class Stack:\n", "def read_json(path):", "def fibonacci(n):\n"])
def test_a_body_is_indented_wherever_the_prompt_ends(model: Any, tokenizer: Tokenizer, prompt: str) -> None:
    """A prompt may stop before or after a line break, though text has the break and the indentation as one token."""
    written = prompt + greedy(model, tokenizer, tokenizer.encode(prompt).ids, 12)
    body = written.removeprefix(prompt.rstrip("\n")).lstrip("\n")
    assert body.startswith("    ")
    assert body.strip()

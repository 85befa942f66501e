"""Adapters for longer contexts than the model's, against PEFT over the model with a linear factor of its rotation."""

import json
from pathlib import Path
from typing import Any

import pytest
from peft_adapters import Batch, load_adapters, peft_logits, save_adapter
from reference_ops import run_ahead
from slot_plans import greedy, prompt_of
from tiny_models import BY_NAME, start

from blockyard.services.gpu_worker.runner import Runner
from blockyard.shared.config.services.lora import LoraConfig
from blockyard.shared.errors import ConfigError
from blockyard.shared.messages import AdapterPlaced

LORA = LoraConfig(max_loras=2, max_cpu_loras=2, long_factors=[2, 3])
BOTH = [AdapterPlaced(0, 1), AdapterPlaced(1, 2)]
PROMPT = prompt_of(30, 4)


def made(tmp_path: Path, factor: int) -> tuple[Path, list[Path], list[Any], int]:
    """A base, an adapter for a longer context, one without, PEFT's models of both, and the length of the base."""
    tiny, base, folders, models = BY_NAME["llama"], tmp_path / "base", [], []
    length = 0
    for number, own in enumerate((factor, 1)):
        model = tiny.save(base)
        length = model.config.max_position_embeddings
        folder = tmp_path / f"{number}"
        adapted = save_adapter(model, folder, number, target_modules=["q_proj", "k_proj", "up_proj"])
        if own > 1:
            model.model.rotary_emb.inv_freq.div_(own)
            config = folder / "adapter_config.json"
            config.write_text(json.dumps(json.loads(config.read_text()) | {"context_length": length * own - 5}))
        folders.append(folder)
        models.append(adapted)
    return base, folders, models, length


def scores(runner: Runner, place: int | None) -> list[float]:
    runner.batch.reset(8)
    others = [1 - place if place is not None else 0, None]  # beside it
    batch = Batch(runner, [place, *others], BOTH, greedy(num_prompt_logprobs=0), [PROMPT, prompt_of(9), prompt_of(7)])
    first = next(one for one in batch.first() if one.slot == 0)
    return [one.logprob for one in first.prompt_logprobs]


@pytest.mark.parametrize("factor", [2, 3])
@pytest.mark.parametrize("is_ahead", [False, True], ids=["cpu", "as on a GPU"])
def test_rows_use_the_rotation_of_their_adapter(factor: int, is_ahead: bool, tmp_path: Path) -> None:
    base, folders, models, length = made(tmp_path, factor)
    runner = start(base, lora=LORA)
    assert (runner.geometry.base_len, runner.geometry.max_model_len) == (length, 3 * length)
    runner.reset(8)
    assert [one.max_len for one in load_adapters(runner, folders)] == [factor * length - 5, 0]
    if is_ahead:
        run_ahead(runner, 16)
        runner.reset(8)
        load_adapters(runner, folders)
    plain = start(base)
    plain.reset(8)
    alone = Batch(plain, [None], [], greedy(num_prompt_logprobs=0), [PROMPT]).first()[0]
    for place, model in enumerate(models):
        wanted = peft_logits(model, PROMPT).log_softmax(-1)
        expected = [float(wanted[at - 1, PROMPT[at]]) for at in range(1, len(PROMPT))]
        assert scores(runner, place) == pytest.approx(expected, abs=1e-4)
    assert scores(runner, None) == pytest.approx([one.logprob for one in alone.prompt_logprobs], abs=1e-4)


def test_what_is_not_served(tmp_path: Path) -> None:
    base, folders, _, length = made(tmp_path, 3)
    for config, cause in (
        (LoraConfig(long_factors=[2]), f"context_length {3 * length - 5} needs the factor 3; .* allows 2"),
        (LoraConfig(), f"context_length {3 * length - 5} is more than the model's {length}: --long-lora"),
    ):
        runner = start(base, lora=config)
        runner.reset(8)
        with pytest.raises(AssertionError, match=cause):
            load_adapters(runner, folders[:1])
    yarn = tmp_path / "yarn"
    BY_NAME["llama-yarn"].save(yarn)
    with pytest.raises(ConfigError, match="--long-lora-scaling-factors: this model's positions"):
        start(yarn, lora=LORA)

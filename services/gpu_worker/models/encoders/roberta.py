"""RoBERTa and XLM-RoBERTa: BERT whose positions begin behind that of the padding token; another classifier."""

from typing import Any

from blockyard.services.gpu_worker.layers.embedding import OutputLayer
from blockyard.services.gpu_worker.layers.linear import LinearLayers
from blockyard.services.gpu_worker.loading.hf_config import parse, with_defaults
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.encoders.bert import DEFAULTS as BERT_DEFAULTS
from blockyard.services.gpu_worker.models.encoders.bert import BertConfig, build_bert
from blockyard.services.gpu_worker.models.encoders.encoder import Encoder
from blockyard.services.gpu_worker.models.output_layers import Stack, make_linear
from blockyard.shared.config.pooling.output_kinds import OutputKind
from blockyard.shared.errors import ConfigError

DEFAULTS = BERT_DEFAULTS | {"vocab_size": 50265, "pad_token_id": 1}  # of fields that config.json may omit
XLM_DEFAULTS = DEFAULTS | {"vocab_size": BERT_DEFAULTS["vocab_size"]}


def build(config: dict[str, Any], table: WeightTable) -> Encoder:
    is_xlm = any(str(name).startswith("XLM") for name in config.get("architectures") or ())
    config = with_defaults(config, XLM_DEFAULTS if is_xlm else DEFAULTS)
    fields = parse(config, BertConfig)
    if fields.pad_token_id is None or fields.pad_token_id < 0:
        raise ConfigError(f"config.json: pad_token_id {fields.pad_token_id}: positions begin behind it")
    return build_bert(config, fields, table, "roberta", fields.pad_token_id + 1, _make_output)


def _make_output(kind: OutputKind, layers: LinearLayers, hidden: int, labels: int) -> OutputLayer:
    if kind is OutputKind.TOKEN_CLASSES:
        return Stack([make_linear(layers, "classifier", labels, hidden, bias=True)], "tanh")
    dense = make_linear(layers, "classifier.dense", hidden, hidden, bias=True)
    return Stack([dense, make_linear(layers, "classifier.out_proj", labels, hidden, bias=True)], "tanh")

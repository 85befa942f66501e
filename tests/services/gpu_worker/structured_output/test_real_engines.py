"""Matcher processes with the real engines: outputs of a tiny model under a JSON schema are always valid."""

import json
import shutil
from pathlib import Path

import jsonschema
import pytest
from plan_driver import Driver
from tiny_models import LLAMA, Tiny, start
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from blockyard.shared.messages import (
    FinishReason,
    Grammar,
    GrammarEngine,
    GrammarKind,
    OutputConstraint,
    Sampling,
)

DEMO_TOKENIZER = Path(__file__).parents[4] / "shared/demo_model/tokenizer.json"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "kind": {"enum": ["a", "b", 3, None]},
        "ids": {"type": "array", "items": {"type": "integer", "minimum": -9, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "kind", "ids"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("engine", [GrammarEngine.GUIDANCE, GrammarEngine.XGRAMMAR])
def test_outputs_under_a_schema_are_valid_with_a_real_engine(engine: GrammarEngine, tmp_path: Path) -> None:
    Tiny("wide", LlamaConfig, LlamaForCausalLM, LLAMA | {"vocab_size": 4100}, {"rope_type": "default"}).save(tmp_path)
    shutil.copy(DEMO_TOKENIZER, tmp_path)
    runner = start(tmp_path)
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA), engine, any_whitespace=False)
    driver = Driver(runner, depth=1)
    streams = [
        driver.add(
            [5, 6 + i],
            Sampling(120, 1.0, seed=i, constraint=OutputConstraint(grammar)),
            preempt_at=(3, 11) if i % 3 == 0 else (),
        )
        for i in range(12)
    ]
    driver.run()
    tokenizer = Tokenizer.from_file(str(DEMO_TOKENIZER))
    for stream in streams:
        assert (stream.finish, stream.detail) == (FinishReason.STOP, "")
        jsonschema.validate(json.loads(tokenizer.decode(stream.output)), SCHEMA)
    assert runner.batch.matchers is not None
    runner.batch.matchers.close()

"""Matcher processes with the real engines: outputs of a tiny model under a JSON schema are always valid."""

import json
import os
import shutil
import signal
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch
from plan_driver import Driver, Stream
from tiny_models import LLAMA, Tiny, start
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from blockyard.services.gpu_worker.structured_output.mask_memory import num_mask_words
from blockyard.services.gpu_worker.structured_output.mask_program import MaskProgram
from blockyard.services.gpu_worker.structured_output.matcher_frames import OutputRules
from blockyard.services.gpu_worker.structured_output.matcher_processes import MatcherKey
from blockyard.shared.grammars.engines import make_engine
from blockyard.shared.grammars.interface import Vocabulary
from blockyard.shared.messages import (
    FinishReason,
    Grammar,
    GrammarEngine,
    GrammarKind,
    OutputConstraint,
    Sampling,
)
from blockyard.shared.tool_parsers.call_grammar import calls_source
from blockyard.shared.tool_parsers.channels.openai import OPENAI
from blockyard.shared.tool_parsers.tools import Tool, ToolKind

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


def grammar_of(engine: GrammarEngine) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA), engine, any_whitespace=False)


@pytest.mark.parametrize("engine", [GrammarEngine.GUIDANCE, GrammarEngine.XGRAMMAR])
def test_outputs_under_a_schema_are_valid_with_a_real_engine(engine: GrammarEngine, tmp_path: Path) -> None:
    Tiny("wide", LlamaConfig, LlamaForCausalLM, LLAMA | {"vocab_size": 4100}, {"rope_type": "default"}).save(tmp_path)
    shutil.copy(DEMO_TOKENIZER, tmp_path)
    runner = start(tmp_path)
    grammar = grammar_of(engine)
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


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("engine", [GrammarEngine.GUIDANCE, GrammarEngine.XGRAMMAR])
def test_on_a_gpu_tokens_are_those_of_the_cpu_at_any_depth_and_when_the_matcher_is_killed(
    engine: GrammarEngine, tmp_path: Path
) -> None:
    Tiny("wide", LlamaConfig, LlamaForCausalLM, LLAMA | {"vocab_size": 4100}, {"rope_type": "default"}).save(tmp_path)
    shutil.copy(DEMO_TOKENIZER, tmp_path)
    cpu, gpu = start(tmp_path, device="cpu"), start(tmp_path, device="cuda")
    matchers = gpu.batch.matchers
    assert matchers is not None and matchers.memory.shared is not None
    found: list[list[tuple[list[int], FinishReason | None, str]]] = []
    for runner, depth, kills in ((cpu, 0, False), (gpu, 0, False), (gpu, 1, False), (gpu, 3, False), (gpu, 3, True)):
        driver = Driver(runner, depth=depth, seed=depth)
        constrained = OutputConstraint(grammar_of(engine))
        streams = [
            driver.add([5, 6 + i], Sampling(90, 0.6 * (i % 2), seed=i, constraint=constrained), preempt_at=(3, 11))
            if i % 4
            else driver.add([5, 6 + i], Sampling(90, 0.0, ignore_eos=True))
            for i in range(13)
        ]
        restarts = matchers.num_restarts
        run(driver, streams, matchers.process_ids if kills else {})
        assert (matchers.num_restarts - restarts >= 2) == kills
        found.append([(s.output, s.finish, s.detail) for s in streams])
    assert found[1:] == found[:1] * 4
    assert matchers.num_masks > 4 * 9 * 15
    for runner in (cpu, gpu):
        assert runner.batch.matchers is not None
        runner.batch.matchers.close()


def run(driver: Driver, streams: list[Stream], killed: dict[MatcherKey, int]) -> None:
    """Kills these processes when the first constrained stream has 5 tokens, and those of then when it has 14."""
    matchers, at = driver.runner.batch.matchers, [5, 14] if killed else []
    assert matchers is not None
    while any(stream.finish is None for stream in streams):
        driver.queued.append(driver.plan())
        while len(driver.queued) + driver.runner.in_flight > driver.depth:
            driver.step()
        if at and len(streams[1].output) >= at[0]:
            at.pop(0)
            for pid in matchers.process_ids.values():
                os.kill(pid, signal.SIGKILL)
    driver.run()


@pytest.mark.parametrize("budget", [8, 40])
def test_a_forced_call_of_gpt_oss_comes_behind_a_budget_of_analysis(budget: int) -> None:
    """Random analysis goes on for ever; behind the budget it ends, and the call follows."""
    tokenizer = Tokenizer.from_file(str(DEMO_TOKENIZER))
    tokenizer.add_special_tokens(list(OPENAI.markers))
    schema = {"type": "object", "properties": {"x": {"enum": [1]}}, "required": ["x"], "additionalProperties": False}
    tool = Tool(ToolKind.FUNCTION, "measure", schema)
    found = calls_source(OPENAI, [tool], parallel=False, forced=True)
    assert found is not None
    grammar = Grammar(GrammarKind.LARK, found.source, GrammarEngine.GUIDANCE, markers=found.markers)
    size, eos = tokenizer.get_vocab_size(), [1]
    compiled = make_engine(GrammarEngine.GUIDANCE, Vocabulary(tokenizer.to_str(), size, eos)).compile(grammar)
    limits = OutputConstraint(grammar, budget=budget, inner_end=tokenizer.token_to_id(OPENAI.reasoning_end))
    program = MaskProgram(OutputRules(limits, [], 0, False, []), compiled, size, eos)
    rng, words = np.random.default_rng(0), np.zeros(num_mask_words(size), np.int32)
    ids = tokenizer.encode("<|channel|>analysis<|message|>", add_special_tokens=False).ids
    program.accept(ids)
    while not program.has_ended:
        program.fill(words)
        allowed = set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())
        if len(ids) < budget:
            allowed.discard(limits.inner_end)
        ids.append(int(rng.choice(sorted(allowed))))
        program.accept(ids[-1:])
        assert len(ids) < budget + 200
    assert ids.index(limits.inner_end) == budget
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert "to=functions.measure<|channel|>commentary json<|message|>{" in text

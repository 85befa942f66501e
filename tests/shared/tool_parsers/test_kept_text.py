"""What formats keep of an answer: a token of long arguments costs the same at the end as at the beginning."""

import tracemalloc

import pytest
from recorded_answers import tool_reader

from blockyard.shared.output_parsing.reader import OutputReader
from blockyard.shared.tool_parsers.registry import BY_NAME

HEADS = {
    "openai": '<|channel|>commentary to=functions.search<|message|>{"query": "',
    "gemma4": '<|tool_call>call:search{query:<|"|>',
    "functiongemma": "<start_function_call>call:search{query:<escape>",
    "pythonic": "[get_time(), search(query='",
    "llama4_pythonic": "<|python_start|>[search(query='",
    "olmo3": "<function_calls>\nsearch(query='",
    "lfm2": "<|tool_call_start|>[search(query='",
}


@pytest.mark.parametrize("name", HEADS)
def test_arguments_are_not_kept(name: str) -> None:
    reader = OutputReader(tool_reader(BY_NAME[name]))
    reader.push(HEADS[name] + "a")
    word = " word," * 1000
    tracemalloc.start()
    for _ in range(100):
        assert "".join(part.text for part in reader.push(word)) == word
    kept_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept_bytes < 10 * len(word)

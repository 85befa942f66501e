"""Lengths and contents of the datasets' requests."""

import json
import random
import statistics
from collections import Counter
from pathlib import Path

import pytest

from blockyard.services.bench import datasets, flags, workload
from blockyard.services.bench.datasets import Lengths, RandomIds, RandomWords, SampleRequest
from blockyard.shared.errors import ConfigError


def requests(*words: str, make_prompt: datasets.PromptMaker | None = None) -> list[SampleRequest]:
    options = flags.serve_parser().parse_args(words)
    workload.check(options)
    return workload.requests(options, make_prompt or RandomIds(100, 4000), lambda text: len(text.split()))


def test_lengths_are_exact_or_uniform() -> None:
    assert datasets.lengths("512", 0.0, "") == Lengths(512, 512)
    assert datasets.lengths("100", 0.25, "") == Lengths(75, 125)
    assert datasets.lengths("100:1024", 0.25, "") == Lengths(100, 1024)
    rng = random.Random(0)
    drawn = [Lengths(100, 1024).sample(rng) for _ in range(5000)]
    assert (min(drawn), max(drawn)) == (100, 1024)
    assert statistics.mean(drawn) == pytest.approx(562, abs=10)


@pytest.mark.parametrize("text", ["", "a", "0", "-3", "9:3", "3:", "1:2:3", "1.5"])
def test_an_invalid_length_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match=f"--input-len {text}: expected"):
        datasets.lengths(text, 0.0, "--input-len")


def test_random_ids_have_the_length_asked_for_and_lie_in_the_range() -> None:
    found = requests("--num-prompts", "50", "--input-len", "10:90", "--output-len", "7", "--seed", "3")
    assert len({request.num_input for request in found}) > 20
    assert all(len(request.prompt) == request.num_input and request.num_output == 7 for request in found)
    ids = {token for request in found for token in request.prompt}
    assert min(ids) >= 100 and max(ids) < 4000 and len(ids) > 1000
    assert found == requests("--num-prompts", "50", "--input-len", "10:90", "--output-len", "7", "--seed", "3")
    assert found != requests("--num-prompts", "50", "--input-len", "10:90", "--output-len", "7", "--seed", "4")


def test_prefixes_are_shared_equally_and_the_rest_is_not() -> None:
    flags_ = ("--dataset", "prefix-shared", "--prefix-len", "32", "--num-prefixes", "4", "--input-len", "8")
    found = requests(*flags_, "--num-prompts", "20")
    assert all(len(request.prompt) == request.num_input == 40 for request in found)
    assert sorted(Counter(tuple(request.prompt[:32]) for request in found).values()) == [5, 5, 5, 5]
    assert len({tuple(request.prompt[32:]) for request in found}) == 20


def test_words_follow_the_servers_tokenizer() -> None:
    found = requests("--num-prompts", "2", "--input-len", "300", make_prompt=RandomWords(tokens_per_word=1.5))
    assert [len(str(request.prompt).split()) for request in found] == [200, 200]
    shared = requests(
        "--dataset", "prefix-shared", "--num-prompts", "9", "--num-prefixes", "1", make_prompt=RandomWords()
    )
    assert len({str(request.prompt)[:1000] for request in shared}) == 1


def test_built_in_lengths_look_like_sharegpt() -> None:
    found = datasets.sharegpt_requests(4000, RandomIds(1, 9), random.Random(0))
    assert all(datasets.is_kept(request.num_input, request.num_output) for request in found)
    assert statistics.mean(request.num_input for request in found) == pytest.approx(210, abs=20)
    assert statistics.mean(request.num_output for request in found) == pytest.approx(200, abs=20)
    assert statistics.median(request.num_input for request in found) < 150, "most are short, a few are long"


def conversation(*values: str) -> dict[str, object]:
    return {"id": "x", "conversations": [{"from": "human", "value": value} for value in values]}


def test_a_sharegpt_file(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    kept = [conversation("a b c d e", "1 2 3 4 5 6", "more"), conversation("f g h i", "1 2 3 4")]
    dropped = [conversation("alone"), conversation("too short", "1 2 3 4"), conversation("a " * 1025, "1 2 3 4"), {}]
    path.write_text(json.dumps(kept + dropped))
    words = ("--dataset", "sharegpt", "--dataset-path", str(path), "--num-prompts", "3")
    found = requests(*words)
    assert {(request.prompt, request.num_input, request.num_output) for request in found} == {
        ("a b c d e", 5, 6),
        ("f g h i", 4, 4),
    }
    assert len(found) == 3, "used again when there are too few"
    assert {request.num_output for request in requests(*words, "--output-len", "33")} == {33}
    path.write_text(json.dumps(dropped))
    with pytest.raises(ConfigError, match="no conversation of 4 has a fitting length"):
        requests(*words)


def test_a_file_that_is_no_dataset(tmp_path: Path) -> None:
    words = ("--dataset", "sharegpt", "--dataset-path")
    with pytest.raises(ConfigError, match="No such file"):
        requests(*words, str(tmp_path / "no.json"))
    (tmp_path / "bad.json").write_text('{"conversations": 1}')
    with pytest.raises(ConfigError, match="not in ShareGPT's format"):
        requests(*words, str(tmp_path / "bad.json"))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--dataset-path", "x"], "--dataset-path: is for --dataset sharegpt, not random"),
        (["--dataset", "sharegpt", "--input-len", "4"], "--input-len: --dataset sharegpt brings its own lengths"),
        (["--dataset", "sharegpt", "--output-len", "4"], "--output-len: without --dataset-path"),
        (["--range-ratio", "1"], "--range-ratio 1.0: expected"),
        (["--num-prompts", "0"], "argument --num-prompts: 0 is not at least 1"),
        (["--request-rate", "-1"], "argument --request-rate: -1 is not above 0"),
        (["--input", "3"], "unrecognized arguments"),
    ],
)
def test_flags_that_contradict_are_one_line(words: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        requests(*words)


def test_ranges_of_ids() -> None:
    assert flags.vocab_range("100:4000") == (100, 4000)
    for text in ("100", "5:5", "9:3", "a:b"):
        with pytest.raises(ConfigError, match="expected a rising range"):
            flags.vocab_range(text)

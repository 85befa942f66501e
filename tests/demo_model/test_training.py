"""Text processing of the demo model's scripts: the split, the cuts, the windows, the baselines."""

import random
from pathlib import Path

import numpy as np
import pytest
from demo_training.baselines import NgramModel
from demo_training.chat_examples import as_task, conversations
from demo_training.corpus import (
    SourceFile,
    Split,
    bucket_of,
    load_corpus,
    read_sources,
    split_sources,
    write_corpus,
)
from demo_training.definitions import definitions
from demo_training.packing import Mixture, cut_text, draw, windows
from demo_training.scoring import IGNORED, scoring_windows
from hypothesis import given
from hypothesis import strategies as st

SOURCE = '''\
class Box:
    """A box."""

    @property
    def area(self, scale=1):
        """Return the area."""
        size = self.width * self.height
        return size * scale
'''


def paths_in(split_low: int, split_high: int) -> list[str]:
    return [path for path in (f"module_{n}.py" for n in range(400)) if split_low <= bucket_of(path) < split_high]


def test_sources_are_found_by_path_without_packages_tables_and_unreadable_files(tmp_path: Path) -> None:
    kept = {"b.py": "x = 1\n", "a/c.py": "# -*- coding: latin-1 -*-\n"}
    left_out = {
        "site-packages/d.py": "y = 1\n",
        "_sysconfigdata_linux.py": "z = 1\n",
        "encodings/cp1.py": "decoding_table = 1\n",
        "empty.py": "\n",
        "bad.py": "# -*- coding: nonsense -*-\n",
    }
    for name, text in {**kept, **left_out}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert [path for path, _ in read_sources(tmp_path)] == sorted(kept)


def test_a_held_out_file_that_repeats_training_text_goes_back_to_training() -> None:
    train, (copy, own) = paths_in(5, 100)[0], paths_in(0, 5)[:2]
    lines = "".join(f"first_value_{n} = compute_value({n})\n" for n in range(10))
    other = "".join(f"second_thing_{n} = another_call({n})\n" for n in range(10))
    files = {
        file.path: file.split for file in split_sources([(train, lines), (copy, lines + other[:40]), (own, other)])
    }
    assert files[train] is files[copy] is Split.TRAIN
    assert files[own] in (Split.VALIDATION, Split.TEST)


def test_a_corpus_file_gives_back_what_was_written(tmp_path: Path) -> None:
    files = [SourceFile("a.py", "x = 'ä'\n", Split.TRAIN), SourceFile("b.py", "y\n", Split.TEST)]
    write_corpus(files, tmp_path / "corpus")
    assert load_corpus(tmp_path / "corpus") == files


def test_definitions_are_dedented_and_can_lose_their_docstring() -> None:
    box, area = definitions("shapes/box.py", SOURCE)
    assert (box.module, box.name, box.is_class, box.signature) == ("shapes.box", "Box", True, "Box")
    assert area.source.startswith('@property\ndef area(self, scale=1):\n    """Return')
    assert (area.signature, area.summary) == ("area(self, scale=1)", "Return the area.")
    assert area.bare_source == "@property\ndef area(self, scale=1):\n" + "\n".join(
        ["    size = self.width * self.height", "    return size * scale", ""]
    )
    assert definitions("broken.py", "def (:\n") == []


def test_tasks_are_third_person() -> None:
    assert as_task("Return the area.") == "returns the area"
    assert as_task("Copies a file.") is None
    assert as_task("Copy a file.") == "copies a file"
    assert as_task("Fetch it now.") == "fetches it now"
    assert as_task("Display a box") == "displays a box"
    assert as_task("A box.") is None


def test_conversations_are_the_same_for_the_same_seed_and_hold_the_source() -> None:
    files = [SourceFile("shapes/box.py", SOURCE, Split.TRAIN)]
    first = conversations(files, 3)
    assert first == conversations(files, 3)
    text = "".join(first)
    assert "```python\n@property\ndef area" in text
    assert text.count("<|im_start|>") == text.count("<|im_end|>")


@given(st.text("ab \n", min_size=1, max_size=300), st.integers(1, 50), st.integers(0, 9))
def test_cut_text_loses_nothing(text: str, every: int, seed: int) -> None:
    pieces = cut_text(text, every, random.Random(seed))
    assert "".join(pieces) == text
    assert all(pieces)


def test_an_epoch_holds_every_plain_document_and_the_shares_asked_for() -> None:
    plain = [np.full(50, n, dtype=np.uint16) for n in range(20)]
    chats = [np.full(10, 100, dtype=np.uint16) for _ in range(100)]
    snippets = [np.full(10, 200, dtype=np.uint16) for _ in range(100)]
    stream = Mixture(plain, chats, snippets, chat_share=0.2, snippet_share=0.1).epoch(np.random.default_rng(0))
    assert [np.count_nonzero(stream == n) for n in range(20)] == [50] * 20
    assert np.mean(stream == 100) == pytest.approx(0.2, abs=0.01)
    assert np.mean(stream == 200) == pytest.approx(0.1, abs=0.01)
    assert len(draw(chats, 10**6, np.random.default_rng(0))) == 100


def test_windows_overlap_by_one_and_cover_the_stream() -> None:
    stream = np.arange(1000, dtype=np.uint16)
    cut = windows(stream, 64, np.random.default_rng(1))
    assert cut.shape[1] == 65
    assert (np.diff(cut.astype(int), axis=1) == 1).all()
    starts = np.sort(cut[:, 0].astype(int))
    assert (np.diff(starts) == 64).all()
    assert len(cut) >= (1000 - 64) // 64


@given(st.integers(2, 200), st.integers(1, 20), st.data())
def test_every_token_but_the_first_is_scored_once(length: int, stride: int, data: st.DataObject) -> None:
    window = data.draw(st.integers(stride, 40))
    document = np.arange(length, dtype=np.uint16)
    scored = []
    for inputs, targets in scoring_windows(document, window, stride):
        assert len(inputs) == len(targets) <= window
        assert all(wanted in (IGNORED, given + 1) for given, wanted in zip(inputs, targets, strict=True))
        scored += [wanted for wanted in targets if wanted != IGNORED]
    assert scored == list(range(1, length))


@pytest.mark.parametrize("order", [1, 2, 3])
def test_ngram_probabilities_add_up_to_one(order: int) -> None:
    rng = np.random.default_rng(5)
    model = NgramModel([rng.integers(0, 6, 80).astype(np.uint16) for _ in range(3)], order)
    past = [0, 3]
    total = sum(model.probabilities(np.array([*past, token], dtype=np.uint16))[-1] for token in range(4096))
    assert total == pytest.approx(1.0)


def test_a_trigram_knows_what_it_counted() -> None:
    model = NgramModel([np.array([1, 2, 3, 1, 2, 3, 1, 2, 4], dtype=np.uint16)], 3)
    after_one_two = model.probabilities(np.array([1, 2, 3], dtype=np.uint16))[-1]
    # unigram: 9 seen, 4 kinds; (2,) seen 3 times with 2 kinds; (1, 2) the same
    unigram = (2 + 4 / 4096) / 13
    bigram = (2 + 2 * unigram) / 5
    assert after_one_two == pytest.approx((2 + 2 * bigram) / 5)

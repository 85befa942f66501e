"""Texts of a step divided among threads: each computed once, in its place, in shares of similar work."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from blockyard.services.gpu_worker.arrays import Ints
from blockyard.services.gpu_worker.execution import text_threads
from blockyard.services.gpu_worker.execution.text_threads import LEAST_TOKENS, TextThreads, divide


@pytest.fixture(autouse=True)
def torch_threads() -> Iterator[None]:
    """Restores the number of torch's threads of this thread."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@given(st.lists(st.integers(1, 512), min_size=1, max_size=60), st.integers(1, 5))
def test_each_text_is_in_one_share_and_shares_have_similar_work(lengths: list[int], most: int) -> None:
    shares = divide(np.array(lengths), most)
    assert sorted(np.concatenate(shares).tolist()) == list(range(len(lengths)))
    if len(lengths) >= most:
        costs = [sum(lengths[i] + lengths[i] ** 2 / text_threads.EVEN_LENGTH for i in share) for share in shares]
        longest = max(lengths) + max(lengths) ** 2 / text_threads.EVEN_LENGTH
        assert len(shares) == most and max(costs) - min(costs) <= longest + 1e-6


@pytest.mark.parametrize("num_threads", [1, 3])
def test_rows_are_where_they_came_from(num_threads: int) -> None:
    lengths = np.array([70, 3, 120, 1, 64, 200])
    seen: list[tuple[int, int]] = []

    def forward(rows: Ints, own: Ints) -> Tensor:
        assert torch.is_inference_mode_enabled() and len(rows) == own.sum()
        seen.append((len(own), torch.get_num_threads()))
        return torch.from_numpy(np.stack([rows, np.repeat(own, own)], 1)).float()

    torch.set_num_threads(4)
    with torch.inference_mode():
        out = TextThreads(num_threads).run(forward, lengths)
    assert out[:, 0].tolist() == list(range(lengths.sum()))
    assert out[:, 1].tolist() == np.repeat(lengths, lengths).tolist()
    assert len(seen) == num_threads and {threads for _, threads in seen} == {4 // num_threads}


def test_few_tokens_are_one_share_with_all_threads_of_torch() -> None:
    shares = []

    def forward(rows: Ints, own: Ints) -> Tensor:
        shares.append(torch.get_num_threads())
        return torch.zeros(len(rows), 2)

    torch.set_num_threads(2)
    threads = TextThreads(2)
    threads.run(forward, np.array([LEAST_TOKENS - 1, LEAST_TOKENS + 1]))
    threads.run(forward, np.array([1] * (LEAST_TOKENS - 1)))
    assert sorted(shares) == [1, 1, 2]


def test_the_error_of_a_thread_is_raised() -> None:
    def forward(rows: Ints, own: Ints) -> Tensor:
        if 7 in own:
            raise RuntimeError("no memory")
        return torch.zeros(len(rows), 2)

    with pytest.raises(RuntimeError, match="no memory"):
        TextThreads(2).run(forward, np.array([500, 493, 7]))

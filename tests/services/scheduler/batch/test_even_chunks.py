"""Chunks of a prompt that take the same time."""

from hypothesis import given, settings
from hypothesis import strategies as st

from blockyard.services.scheduler.batch.pipeline_turns import even_chunk, tokens_of_cost


def cost(num_tokens: int, context: int, balanced: int) -> float:
    return sum(1 + (context + i + 0.5) / balanced for i in range(num_tokens))


@settings(deadline=None)
@given(st.integers(1, 3000), st.integers(0, 100_000), st.integers(1, 50_000))
def test_a_chunk_takes_no_longer_than_the_first(most: int, context: int, balanced: int) -> None:
    found, first = even_chunk(most, context, balanced), cost(most, 0, balanced)
    assert 1 <= found <= most
    assert found == 1 or cost(found, context, balanced) <= first * (1 + 1e-9)
    assert found == most or cost(found + 1, context, balanced) > first * (1 - 1e-9)


@settings(deadline=None)
@given(st.integers(1, 3000), st.integers(0, 100_000), st.integers(1, 50_000))
def test_a_chunk_counts_as_so_many_first_tokens(num_tokens: int, context: int, balanced: int) -> None:
    found = tokens_of_cost(num_tokens, context, balanced)
    assert cost(found, 0, balanced) >= cost(num_tokens, context, balanced) * (1 - 1e-9)
    assert found == num_tokens or cost(found - 1, 0, balanced) < cost(num_tokens, context, balanced) * (1 + 1e-9)


def test_without_a_balanced_context_all_chunks_have_one_size() -> None:
    assert even_chunk(512, 30_000, 0) == tokens_of_cost(512, 30_000, 0) == 512

"""Nodes of ranks: all have room, the leader is on its own, tensor-parallel groups are whole where they can be."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from blockyard.services.gpu_worker.ranks.ray_group.node_choice import Node, as_table, choose_nodes, in_words

FREE = st.lists(st.integers(0, 9), min_size=1, max_size=6)
SIZE = st.integers(1, 5)


def nodes(free: list[int]) -> list[Node]:
    return [Node(f"node {i}", f"10.0.0.{i}", count, count + i) for i, count in enumerate(free)]


@given(FREE, SIZE, SIZE)
def test_ranks_have_room_and_groups_are_whole_where_they_fit(free: list[int], size: int, num_groups: int) -> None:
    chosen = choose_nodes(nodes(free), "node 0", size, num_groups)
    if free[0] < 1 or sum(free) < size * num_groups:
        assert chosen is None
        return
    assert chosen is not None and len(chosen) == size * num_groups
    assert chosen[0] == "node 0"
    for node, count in Counter(chosen).items():
        assert count <= free[int(node.split()[1])]
    groups = [chosen[i : i + size] for i in range(0, len(chosen), size)]
    whole = sum(len(set(group)) == 1 for group in groups)
    first = int(free[0] >= size)
    room = [free[0] - (size if first else 1), *free[1:]]
    assert whole - first >= min(sum(count // size for count in room), num_groups - 1), "one more would be whole"
    if first:
        assert set(groups[0]) == {"node 0"}


def test_groups_share_the_leaders_node_and_leave_large_gaps_alone() -> None:
    assert choose_nodes(nodes([8, 8]), "node 0", 2, 4) == ["node 0"] * 8
    assert choose_nodes(nodes([3, 4, 2]), "node 0", 2, 2) == ["node 0"] * 2 + ["node 2"] * 2
    assert choose_nodes(nodes([1, 4]), "node 0", 4, 1) == ["node 0", "node 1", "node 1", "node 1"]


def test_the_table_has_a_line_a_node_and_the_leaders_first() -> None:
    table = as_table(nodes([2, 0]), "node 1", 3, "GPUs")
    assert [line.split() for line in table] == [
        ["node", "free,", "in", "GPUs", "in", "all", "needed"],
        ["10.0.0.1", "(this", "machine)", "0", "1", "1", "or", "more"],
        ["10.0.0.0", "2", "2"],
        ["all", "2", "3", "3"],
    ]
    assert in_words(nodes([2, 0]), "node 1", 3, "GPUs") == (
        "needed: 3 GPUs, 1 or more on this machine; free: 0 of 1 on 10.0.0.1 (this machine), 2 of 2 on 10.0.0.0"
    )

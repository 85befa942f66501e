"""Which node of a Ray cluster each rank of a worker runs on. Pure functions of numbers, without Ray."""

from collections.abc import Sequence
from typing import NamedTuple


class Node(NamedTuple):
    """A machine of the cluster, and how many ranks it has room for."""

    id: str
    address: str
    free: int  # now
    total: int  # if nothing else ran there


def choose_nodes(nodes: Sequence[Node], own: str, group_size: int, num_groups: int) -> list[str] | None:
    """Returns the node of each rank, in their order, or None if there is no room for all.

    Rank 0 runs on the node `own`, where the leader is. The ranks of a tensor-parallel group, which follow each other,
    run on one node if they fit: on this one if it has room, else on the one with the least.
    """
    free = {node.id: node.free for node in nodes}
    if free.get(own, 0) < 1 or sum(free.values()) < group_size * num_groups:
        return None
    chosen: list[list[str]] = [[] for _ in range(num_groups)]

    def take(group: int, node: str, count: int) -> None:
        chosen[group] += [node] * count
        free[node] -= count

    take(0, own, group_size if free[own] >= group_size else 1)
    for group in range(1, num_groups):
        fitting = [node for node in free if free[node] >= group_size]
        if fitting:
            take(group, min(fitting, key=lambda node: (node != own, free[node])), group_size)
    for group, nodes_of_it in enumerate(chosen):  # those that fit on no node, on as few as possible
        while len(nodes_of_it) < group_size:
            node = max(free, key=free.__getitem__)
            take(group, node, min(free[node], group_size - len(nodes_of_it)))
    return [node for group in chosen for node in group]


def as_table(nodes: Sequence[Node], own: str, num_ranks: int, unit: str) -> list[str]:
    """Returns a table of what ranks need and what each node has, a line a row. unit: what is counted."""
    rows = [("node", f"free, in {unit}", "in all", "needed")]
    for node in _own_first(nodes, own):
        rows.append((_name(node, own), str(node.free), str(node.total), "1 or more" if node.id == own else ""))
    rows.append(("all", str(sum(n.free for n in nodes)), str(sum(n.total for n in nodes)), str(num_ranks)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def in_words(nodes: Sequence[Node], own: str, num_ranks: int, unit: str) -> str:
    """Returns the same in one line."""
    free = ", ".join(f"{node.free} of {node.total} on {_name(node, own)}" for node in _own_first(nodes, own))
    return f"needed: {num_ranks} {unit}, 1 or more on this machine; free: {free}"


def _own_first(nodes: Sequence[Node], own: str) -> list[Node]:
    return sorted(nodes, key=lambda node: (node.id != own, node.address))


def _name(node: Node, own: str) -> str:
    return f"{node.address} (this machine)" if node.id == own else node.address

"""Shares of an adapter's matrices: ranks together have each number once, and their products add up to the whole."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from blockyard.services.gpu_worker.layers.linear import make_spec
from blockyard.services.gpu_worker.loading.linear_spec import Rows, Split, part
from blockyard.services.gpu_worker.lora.ranks.layer_share import LayerShare
from blockyard.services.gpu_worker.parallel.shares import Shard


@given(
    size=st.integers(1, 5),
    rank=st.integers(1, 9),
    heads=st.integers(5, 9),
    is_split_by_inputs=st.booleans(),
    fully_sharded=st.booleans(),
)
def test_products_of_all_ranks(size: int, rank: int, heads: int, is_split_by_inputs: bool, fully_sharded: bool) -> None:
    """Each rank multiplies its parts; between the two products ranks add what they have, if they are fully sharded."""
    split = Split.INPUTS if is_split_by_inputs else Split.OUTPUTS
    parts = [part("q", heads * 2, heads)] + ([] if is_split_by_inputs else [part("k", 6, 1)])
    spec = make_spec(parts, Rows(heads * 4, heads), split=split)
    shares = [LayerShare(spec, Shard(one, size), fully_sharded=fully_sharded) for one in range(size)]
    x = torch.randn(3, heads * 4).double()
    for index, one in enumerate(parts):
        a, b = torch.randn(rank, heads * 4).double(), torch.randn(one.size, rank).double()
        shrunk = []
        for share in shares:
            mine = torch.zeros(3, rank).double()
            own = x[:, share.inputs.start : share.inputs.stop]
            mine[:, share.own_rank(rank).start : share.own_rank(rank).stop] = own @ share.cut_a(a).T
            shrunk.append(mine)
        whole = torch.stack(shrunk).sum(0)
        results = []
        for shard, (share, mine) in enumerate(zip(shares, shrunk, strict=True)):
            product = (whole if share.sums_between else mine) @ share.cut_rows(b, index).T
            assert product.shape[1] == share.sizes[index]
            assert share.sums_between == (fully_sharded and size > 1)
            results.append((shard, share, product))
        expected = x @ a.T @ b.T
        if is_split_by_inputs:
            found = torch.zeros_like(expected)
            for _, share, product in results:
                found[:, share.starts[index] : share.starts[index] + share.sizes[index]] += product
            torch.testing.assert_close(found, expected)
            assert [share.has_bias for share in shares] == [bool(fully_sharded or not rank) for rank in range(size)]
        else:
            for shard, share, product in results:
                rows = torch.cat([expected[:, own.start : own.stop] for own in spec.rows(one, Shard(shard, size))], 1)
                torch.testing.assert_close(product, rows)
                assert share.has_bias

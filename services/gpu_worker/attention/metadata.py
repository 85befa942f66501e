"""The rows of a step on a GPU: what its attention is built from."""

from dataclasses import dataclass

from torch import Tensor

from blockyard.kernels.kv_cache.paged_kv import PagedKVMetadata


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """The rows of a step: decodes first, one for each sequence, then the rows of prefills."""

    rows: PagedKVMetadata
    query_start_loc: Tensor | None = None  # [prefills + 1] int32: first row of each prefill, then the number of rows
    num_decodes: int = 0  # where query_start_loc is None, all rows are decodes
    max_seq_len: int | None = None  # upper bound of sequence lengths; None: the length of the block tables
    # The same of prefills; None: max_seq_len. It decides how kernels share work: a lower one costs time alone.
    prefill_max_seq_len: int | None = None
    max_context_len: int = 0  # upper bound of a prefill's tokens before this step, where a layer is latent

"""How the attention of a layer makes probabilities of scores: one value from the layer to the kernel."""

from dataclasses import dataclass, field

from torch import Tensor

LOG2E = 1.4426950408889634


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRules:
    """What kernels know of a layer beside the sizes of its tensors."""

    scale: float  # factor of q @ k before the softmax
    window: int | None = None  # number of last keys, its own included, that a token attends to; None: all
    both_sides: bool = False  # a token attends to later keys, too, and then to those whose distance is below `window`
    chunked: bool = False  # positions are in chunks of `window`, and a token attends to its own; otherwise it slides
    soft_cap: float | None = None  # scores become soft_cap * tanh(scores / soft_cap); None: not
    sinks: Tensor | None = field(default=None, compare=False)  # [heads] float32: a score for each head that is in the
    # sum of the softmax and has no value; None: no sinks
    kv_scales: Tensor | None = field(default=None, compare=False)  # [2] float32, by which K and V of an 8-bit cache
    # are multiplied, see `check_kv_dtype`; None: of another cache. Latent rows have the first

    def num_keys(self, max_seq_len: int) -> int:
        """The most keys that a token attends to."""
        return max_seq_len if self.window is None else min(self.window, max_seq_len)

    @property
    def power_scale(self) -> float:
        """The factor of q @ k for `attention_tiles.apply_soft_cap`: includes log2(e), if there is no cap."""
        return self.scale * LOG2E if self.soft_cap is None else self.scale

"""Decides which size of CUDA graph a step with prefill is padded to, and which size is captured next. Without torch.

A graph of a larger size costs device time for padding; a launch kernel by kernel costs host time where that is longer
than device time. Device time is measured at captures, and interpolated by tokens for other sizes.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean

from blockyard.services.gpu_worker.execution.cuda.prefill_steps import BatchDescriptor

PREFILL_TOKENS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)  # prompt tokens
LATER_PREFILL_TOKENS = (96, 192, 384, 768, 1536)  # prompt tokens that are captured later
DECODE_ROWS = (16, 64, 128, 256, 512, 1024)  # rows of decodes beside prompts
LATER_DECODE_ROWS = (32, 48, 96, 192, 384, 768)  # rows of decodes that are captured later
FIRST_PREFILL_TOKENS = 512  # prompt tokens of the first capture: it predicts the others
# Sizes that are captured whatever the estimates say: the first one, and the largest step of prompts alone. A step of
# few tokens takes a mixture of experts nearly as long as one of many: the first size alone would predict too much.
NUM_MEASURED = 2
MIN_PREFILLS = 8  # prompts at least
MIN_TOKENS_OF_PREFILL = 32  # prompts have so many tokens each when a size with decodes is full
# Sizes are captured that keep the device up to so many times as long as a launch takes the host: launches of one worker
# were seen to differ by as much, by what else its host does. This holds for sizes that find room in the memory of
# larger ones.
LAUNCH_MARGIN = 1.5
MOST_BYTES = 512 << 20  # of all graphs; later ones take only what memory the largest one leaves free


@dataclass(frozen=True, slots=True)
class GraphCost:
    """Measurements of a captured size."""

    launch_s: float  # host time to launch its kernels one by one
    device_s: float  # device time
    num_bytes: int  # growth of the memory of all graphs
    peak_bytes: int  # of the step alone: graphs share memory


class PrefillGraphSizes:
    """The sizes of one model and their measured costs."""

    def __init__(self, capacity: int, most_tokens: int, padded_num_seqs: Callable[[int], int]) -> None:
        """padded_num_seqs: number of sampled sequences that a step is padded to."""
        self.missing = descriptors(capacity, most_tokens, padded_num_seqs)
        # of steps that keep hidden rows: few workers have any, so they are captured only after steps missed them
        self._missing_kept = [replace(one, keeps_hidden=True) for one in self.missing]
        self._num_all = len(self.missing)
        self._device_s: dict[BatchDescriptor, float] = {}  # of captured sizes, the smallest first
        self._launches_s: list[float] = []  # host times of launches kernel by kernel
        self.num_bytes = 0  # of all graphs
        self._most_tokens, self._most_peak_bytes = 0, 1  # of the largest captured size
        self._lost_s: dict[BatchDescriptor, float] = {}  # by missing size: time that steps lost without it

    @property
    def captured(self) -> float:
        """The fraction of sizes that were captured or dropped as not useful; below 1.0 while steps miss one."""
        num_left = len(self.missing) + sum(one.keeps_hidden for one in self._lost_s)
        return max(1.0 - num_left / max(self._num_all, 1), 0.0)

    def add_captured(self, descriptor: BatchDescriptor, measured: GraphCost) -> None:
        """Adds a captured size."""
        self._device_s[descriptor] = measured.device_s
        self._launches_s.append(measured.launch_s)
        self.num_bytes += measured.num_bytes
        if descriptor.num_tokens >= self._most_tokens:  # of a small size logits may be the most
            self._most_tokens, self._most_peak_bytes = descriptor.num_tokens, max(measured.peak_bytes, 1)
        most = MOST_BYTES * self._most_tokens / self._most_peak_bytes
        if self.num_bytes >= MOST_BYTES:
            most = self._most_tokens - 1  # these find room in what the largest one has
        self.missing, self._missing_kept = (
            [one for one in missing if one != descriptor and one.num_tokens <= most]
            for missing in (self.missing, self._missing_kept)
        )
        left = {*self.missing, *self._missing_kept}
        self._lost_s = {one: lost_s for one, lost_s in self._lost_s.items() if one in left}

    def give_up(self) -> None:
        """Captures no more sizes."""
        self.missing.clear()
        self._missing_kept.clear()
        self._lost_s.clear()

    def next(self) -> BatchDescriptor | None:
        """The next size to capture: the one without which steps lost most time. Sizes that are not useful are dropped.
        None: none is left."""
        if len(self._device_s) >= NUM_MEASURED and self._lost_s:
            return max(self._lost_s, key=self._lost_s.__getitem__)
        while self.missing:
            is_measured = len(self._device_s) >= NUM_MEASURED
            if not is_measured or self._is_useful(self.missing[0]):
                return self.missing[0]
            del self.missing[0]
        return None

    def pick(self, step: BatchDescriptor) -> BatchDescriptor | None:
        """The captured size that computes a step fastest; None: eager launches are faster."""
        fitting = [one for one in self._device_s if covers(one, step)]
        best = min(fitting, key=lambda one: self._device_s[one], default=None)
        if best is None or self._device_s[best] > self._eager_s(step) or not self._is_useful(best):
            return None
        return best

    def on_step(self, step: BatchDescriptor) -> None:
        """Counts the time that a step loses because a size is missing."""
        missing = self._missing_kept if step.keeps_hidden else self.missing
        wanted = min((one for one in missing if covers(one, step)), key=lambda one: one.num_tokens, default=None)
        if wanted is None:
            return
        taken = self.pick(step)
        now_s = self._eager_s(step) if taken is None else self._device_s[taken]
        lost_s = now_s - self._estimate_s(wanted.num_tokens)
        if lost_s > 0:
            self._lost_s[wanted] = self._lost_s.get(wanted, 0.0) + lost_s

    def _is_useful(self, descriptor: BatchDescriptor) -> bool:
        """Whether launches may take the host longer than the device, by the estimate."""
        margin = LAUNCH_MARGIN if descriptor.num_tokens <= self._most_tokens else 1.0
        return self._estimate_s(descriptor.num_tokens) < margin * fmean(self._launches_s)

    def _eager_s(self, step: BatchDescriptor) -> float:
        return max(fmean(self._launches_s), self._estimate_s(step.num_tokens))

    def _estimate_s(self, tokens: int) -> float:
        """Device time for so many tokens."""
        known = [(one.num_tokens, seconds) for one, seconds in self._device_s.items() if not one.keeps_hidden]
        below = max((one for one in known if one[0] <= tokens), default=None)
        above = min((one for one in known if one[0] >= tokens), default=None)
        if below is None or above is None or below[0] == above[0]:
            nearest = below or above
            assert nearest is not None, "a size was captured"
            return nearest[1] * tokens / nearest[0]
        share = (tokens - below[0]) / (above[0] - below[0])
        return below[1] + share * (above[1] - below[1])


def covers(descriptor: BatchDescriptor, step: BatchDescriptor) -> bool:
    """Whether a step can be padded to a size. One prompt more is the padding."""
    return (
        descriptor.num_decodes >= step.num_decodes
        and descriptor.num_prefill_tokens >= step.num_prefill_tokens
        and descriptor.num_prefills > step.num_prefills
        and descriptor.num_seqs >= step.num_seqs
        and descriptor.keeps_hidden == step.keeps_hidden
    )


def descriptors(capacity: int, most_tokens: int, padded_num_seqs: Callable[[int], int]) -> list[BatchDescriptor]:
    """All sizes in capture order: two that predict the others, one that covers every step, then the most common."""
    prefill_tokens = [*(n for n in PREFILL_TOKENS if n < most_tokens), most_tokens]
    rows = [*(n for n in DECODE_ROWS if n < capacity), capacity] if capacity > 1 else []
    all_rows = sorted({*rows, *(n for n in LATER_DECODE_ROWS if n < capacity)}) if capacity > 1 else []
    all_prefill_tokens = sorted({*prefill_tokens, *(n for n in LATER_PREFILL_TOKENS if n < most_tokens)})
    first = min(FIRST_PREFILL_TOKENS, most_tokens)
    alone = [first, most_tokens, 128, 256, 64, 32, *prefill_tokens, *LATER_PREFILL_TOKENS]
    usual = sorted(prefill_tokens, key=lambda n: (n > FIRST_PREFILL_TOKENS, -n))
    wanted = [(0, n) for n in alone if n <= most_tokens]
    wanted[2:2] = [(n, most_tokens) for n in rows[-1:]]
    wanted[7:7] = [(n, m) for m in usual for n in sorted(rows, key=lambda n: abs(n - 64))]
    wanted += [(n, m) for m in all_prefill_tokens for n in all_rows]
    return [_descriptor(decodes, tokens, capacity, padded_num_seqs) for decodes, tokens in dict.fromkeys(wanted)]


def _descriptor(
    decodes: int, prefill_tokens: int, capacity: int, padded_num_seqs: Callable[[int], int]
) -> BatchDescriptor:
    prefills = max(MIN_PREFILLS, prefill_tokens // MIN_TOKENS_OF_PREFILL if decodes else 0)
    return BatchDescriptor(decodes, prefill_tokens, prefills + 1, padded_num_seqs(min(decodes + prefills, capacity)))

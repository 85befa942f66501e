"""One item of the suite: figure, model, flags, and its target and floor on one NVIDIA H200."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from blockyard.services.bench.suite import measures
from blockyard.services.bench.suite.measures import Measurement, SuiteContext
from blockyard.services.bench.suite.served import SuiteServer

B8, B1, Q06 = "llama-3.1-8b", "llama-3.2-1b", "qwen3-0.6b"
Q30, OSS = "qwen3-30b-a3b", "gpt-oss-20b"
UNCACHED = ("--no-enable-prefix-caching",)
SHORT, LONG = ("--max-model-len", "8192"), ("--max-model-len", "40000")
ONE = UNCACHED + SHORT
TO_9K = (*UNCACHED, "--max-model-len", "9216")  # for all items of a model, so that they share a server
SPREAD = ("--api-gateways", "6", "--detokenizers", "2")


@dataclass(frozen=True, slots=True)
class SuiteItem:
    name: str
    what: str
    unit: str
    model: str
    flags: tuple[str, ...]  # of `blockyard serve`, or of `LLM` for offline items
    target: float
    floor: float | None  # limit set by memory bandwidth and tensor cores; None: not computed
    more_is_better: bool
    # one of the two: on a server that items with equal flags share, or starting what it measures
    measure_server: Callable[[SuiteServer], Measurement] | None = None
    measure_alone: Callable[[SuiteContext], Measurement] | None = None
    base: str = ""  # an item before: target and floor are of this item's value divided by that one's
    adapters: tuple[int, ...] = ()  # the ranks of LoRA adapters that the server has, `adapters.names`

    def meets_target(self, value: float) -> bool:
        return value >= self.target if self.more_is_better else value <= self.target


def low(name: str, what: str, unit: str, model: str, flags: tuple[str, ...], target: float, floor: float | None,
         measure_server: Callable[[SuiteServer], Measurement]) -> SuiteItem:  # fmt: skip
    return SuiteItem(name, what, unit, model, flags, target, floor, False, measure_server=measure_server)


def high(name: str, what: str, model: str, flags: tuple[str, ...], target: float, floor: float | None,
         measure_server: Callable[[SuiteServer], Measurement]) -> SuiteItem:  # fmt: skip
    return SuiteItem(name, what, "tokens/s", model, flags, target, floor, True, measure_server=measure_server)


def stream(name: str, model: str, title: str, target: float, floor: float, flags: tuple[str, ...]) -> SuiteItem:
    return low(f"itl-{name}", f"{title}, one stream, 128 in / 256 out, ITL", "ms", model, flags, target, floor,
                measures.inter_token(1, 128, 256))  # fmt: skip


def batch(name: str, model: str, title: str, target: float, floor: float, flags: tuple[str, ...]) -> SuiteItem:
    return low(f"decode-64-{name}", f"{title}, 64 running at context 1,024, ITL", "ms", model, flags, target, floor,
                measures.inter_token(64, 960, 128))  # fmt: skip


def ttft(num: int, name: str, model: str, title: str, target: float, floor: float, flags: tuple[str, ...]) -> SuiteItem:
    return low(f"ttft-{name}-{num}", f"{title}, first token of a prompt of {num:,}", "ms", model, flags, target, floor,
                measures.first_token(num))  # fmt: skip


def compared(item: SuiteItem, base: str) -> SuiteItem:
    """The item with target and floor for its value divided by that of `base`."""
    return replace(item, base=base)

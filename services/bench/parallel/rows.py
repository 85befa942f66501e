"""The table of `blockyard bench parallel`: figures with their ratios, floors and bars. Pure.

Floors of figures on GPUs are those of memory: a token reads all weights once, at the rate that was measured in the same
run, and two GPUs exchange LINK_BYTES_PER_S. Bars are those of two H100 or H200 of one host.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from blockyard.services.bench.parallel.layouts import ONE
from blockyard.services.bench.parallel.measures import ServerFigures
from blockyard.shared.messages import SumTime

HEAD = "| item | layout | measured | compared with | ratio | floor | bar |\n|---|---|---|---|---|---|---|"
LINK_BYTES_PER_S = 390e9
SUMS, START, KILL, BALANCE = "all-reduce", "start", "kill", "balance"
NCCL = "NCCL"  # a transport of sums


class Bar(msgspec.Struct, frozen=True):
    """What a figure has to reach: of its ratio to `base`, or by itself."""

    floor: float | None  # None: not known
    bar: float
    base: str = ONE.name  # a layout, or an item of the same layout; empty: none
    more: bool = False  # it is to be reached from below


class Item(msgspec.Struct, frozen=True):
    """A figure of each layout."""

    what: str  # with names of sizes
    unit: str
    measure: Callable[[ServerFigures], float] | None = None  # on a running server; None: see `command`
    of_one: bool = True  # one GPU has it, too


ITEMS: dict[str, Item] = {
    SUMS: Item("sums over ranks, alone and with residual and norm", "us", of_one=False),
    "itl-one": Item("one stream, ITL", "ms", ServerFigures.one_stream),
    "itl-some": Item("{streams} running at context {context:,}, ITL", "ms", ServerFigures.some_streams),
    "rate": Item("{many} running at context {context:,}", "tokens/s", ServerFigures.rate),
    "idle": Item("{many} running, share of a GPU's time without a kernel", "", ServerFigures.idle, of_one=False),
    "ttft": Item("a prompt of {prompt:,} tokens, TTFT", "ms", ServerFigures.first_token),
    "ttft-long": Item("a prompt of {long:,} tokens, TTFT", "ms", ServerFigures.first_token_long),
    "kv-blocks": Item("KV blocks, of all parts", "blocks", ServerFigures.kv_blocks),
    START: Item("second start to first token", "s"),
    KILL: Item("kill -9 of a rank to the next token", "s", of_one=False),
    BALANCE: Item("skewed routing, fullest rank to the mean once experts have moved, worst layer", "", of_one=False),
}
BARS: dict[tuple[str, str], Bar] = {  # by layout and item
    ("tp2", "itl-one"): Bar(0.5, 0.68),
    ("tp2", "itl-some"): Bar(0.5, 0.66),
    ("tp2", "rate"): Bar(2.0, 1.55, more=True),
    ("tp2", "ttft"): Bar(0.5, 0.62),
    ("tp2", START): Bar(1.0, 1.3),
    ("tp2", KILL): Bar(1.0, 1.2, START),
    ("pp2", "itl-one"): Bar(1.0, 1.05),
    ("pp2", "rate"): Bar(2.0, 1.7, more=True),
    ("pp2", "ttft-long"): Bar(0.5, 0.62),
    ("pp2", "idle"): Bar(0.0, 0.06, ""),
    ("ep2", BALANCE): Bar(1.0, 1.15, ""),
    ("dp2ep2", "rate"): Bar(None, 1.25, "dp2", more=True),
    ("dp2ep2", "kv-blocks"): Bar(None, 1.8, "tp2", more=True),
}
EXPERT_BARS: dict[str, Bar] = {"itl-one": Bar(0.5, 0.85), "itl-some": Bar(0.5, 0.66)}  # of the best layout of two
SUM_BARS: dict[int, tuple[float, float | None, float | None]] = {  # us by KiB: floor, bar alone, bar with a norm
    16: (3.0, 8.0, 10.0),
    512: (3.0, None, 12.0),
    1024: (5.0, None, 14.0),
    2048: (7.0, None, 20.0),
}
TO_NCCL = {16: 0.75, 16 << 10: 1.03, 64 << 10: 1.03}  # bars of other transports' time to NCCL's, by KiB


class ParallelRow(msgspec.Struct, frozen=True):
    """A line of the table."""

    item: str
    layout: str
    what: str
    value: float | None = None  # None: see `problem`
    unit: str = ""
    base: str = ""  # what `ratio` is to
    base_value: float | None = None
    bar: Bar | None = None
    floor: float | None = None  # of `value`
    problem: str = ""

    @property
    def ratio(self) -> float | None:
        return None if self.value is None or not self.base_value else self.value / self.base_value

    @property
    def is_met(self) -> bool | None:
        """None: there is no bar, or nothing to compare."""
        compared = self.value if self.bar is None or not self.bar.base else self.ratio
        if self.bar is None or compared is None:
            return None
        return compared >= self.bar.bar if self.bar.more else compared <= self.bar.bar

    def __str__(self) -> str:
        name = f"{self.item}: {self.what}"
        if self.value is None:
            lines = [line.strip() for line in self.problem.splitlines() if line.strip()]
            return f"| {name} | {self.layout} | {' '.join(dict.fromkeys((lines[0], lines[-1])))} | | | | |"
        base = "" if self.base_value is None else f"{self.base}: {_figure(self.base_value)} {self.unit}".rstrip()
        ratio = "" if self.ratio is None else f"{self.ratio:.3f}"
        floors = [] if self.bar is None or self.bar.floor is None else [f"{self.bar.floor:g}"]
        if self.floor is not None:
            floors.append(f"{_figure(self.floor)} {self.unit} ({self.floor / self.value:.2f} of it)")
        bar = "" if self.bar is None else f"{self.bar.bar:g}" + (" (missed)" if self.is_met is False else "")
        measured = f"{_figure(self.value)} {self.unit}".rstrip()
        return f"| {name} | {self.layout} | {measured} | {base} | {ratio} | {', '.join(floors)} | {bar} |"


def row_of(
    item: str, layout: str, what: str, values: Mapping[tuple[str, str], float], *, of_mixture: bool
) -> ParallelRow:
    """values: measured so far, by layout and item; that of the row is among them. of_mixture: the model has experts."""
    bar = BARS.get((layout, item))
    if of_mixture and layout in ("tp2", "ep2") and item in EXPERT_BARS:
        bar = EXPERT_BARS[item]
    base = ONE.name if bar is None else bar.base
    other = (layout, base) if base in ITEMS else (base, item)
    base_value = None if layout == ONE.name or not base else values.get(other)
    return ParallelRow(item, layout, what, values[layout, item], ITEMS[item].unit, base, base_value, bar)


def failed(item: str, layout: str, what: str, problem: str) -> ParallelRow:
    return ParallelRow(item, layout, what, problem=problem)


def sum_rows(layout: str, times: Sequence[SumTime], *, has_bars: bool) -> list[ParallelRow]:
    """Rows for each size and transport: alone, with residual and norm, and compared with NCCL.

    has_bars: there are two GPUs.
    """
    of_nccl = {one.num_bytes: one for one in times if one.transport == NCCL}
    rows = list[ParallelRow]()
    for one in times:
        kib, nccl = one.num_bytes // 1024, of_nccl.get(one.num_bytes)
        floor, *bars = SUM_BARS.get(kib, (1e6 * one.num_bytes / LINK_BYTES_PER_S, None, None))
        what = f"{_size(kib)}, {one.transport}"
        both = ((what, one.sum_s), (f"{what}, with residual and norm", one.with_norm_s))
        for (name, seconds), most in zip(both, bars, strict=True):
            row = ParallelRow(SUMS, layout, name, 1e6 * seconds, "us")
            bar = None if most is None else Bar(None, most, "")
            rows.append(msgspec.structs.replace(row, bar=bar, floor=floor) if has_bars else row)
        if nccl is not None and nccl is not one:
            bar = Bar(None, TO_NCCL[kib], NCCL) if has_bars and kib in TO_NCCL else None
            compared = (1e6 * one.sum_s, "us", NCCL, 1e6 * nccl.sum_s)
            rows.append(ParallelRow(SUMS, layout, f"{what} to NCCL", *compared, bar))
    return rows


def read_floor_ms(config: Mapping[str, Any], num_ranks: int, bytes_per_s: float) -> float | None:
    """Returns the time in which ranks read the weights of a dense model in 16 bits, each its part; None for a mixture.

    config: of the text model.
    """
    try:
        hidden, inner, layers = (int(config[key]) for key in ("hidden_size", "intermediate_size", "num_hidden_layers"))
        heads, vocab = int(config["num_attention_heads"]), int(config["vocab_size"])
    except KeyError:
        return None
    if has_experts(config):
        return None
    head_dim = int(config.get("head_dim") or hidden // heads)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    layer = hidden * head_dim * 2 * (heads + kv_heads) + 3 * hidden * inner
    return 1e3 * 2 * (layers * layer + vocab * hidden) / num_ranks / bytes_per_s


def has_experts(config: Mapping[str, Any]) -> bool:
    return any(config.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts"))


def _size(kib: int) -> str:
    return f"{kib} KB" if kib < 1024 else f"{kib / 1024:g} MB"


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:,.4g}"

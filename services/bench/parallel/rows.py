"""The table of `blockyard bench parallel`: figures with their ratios, floors and bars. Pure.

Floors of figures on GPUs are those of memory: a token reads all weights once, at the rate that was measured in the same
run, and two GPUs exchange LINK_BYTES_PER_S. Bars are those of H100 or H200 of one host.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from blockyard.services.bench.parallel.items import IDLE, ITEMS, KILL, PEER_ITEM, START, SUMS, TEXTS
from blockyard.services.bench.parallel.layouts import ONE, PEER, PEER_OF, Layout
from blockyard.shared.messages import SumTime

COLUMNS = ("model", "item", "layout", "measured", "compared with", "ratio", "floor", "bar", "verdict")
HEAD = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}"
LINK_BYTES_PER_S = 390e9
NCCL = "NCCL"  # a transport of sums


class Bar(msgspec.Struct, frozen=True):
    """What a figure has to reach: of its ratio to `base`, or by itself."""

    floor: float | None  # None: not known
    bar: float
    base: str = ONE.name  # a layout, or an item of the same layout; empty: none
    more: bool = False  # it is to be reached from below


BARS: dict[tuple[str, str], Bar] = {  # by layout and item; those with the base ONE are of dense models
    ("tp2", "itl-one"): Bar(0.5, 0.68),
    ("tp2", "floor-one"): Bar(1.0, 0.88, "", more=True),
    ("tp2", "itl-some"): Bar(0.5, 0.66),
    ("tp2", "rate"): Bar(2.0, 1.55, more=True),
    ("tp2", "ttft"): Bar(0.5, 0.62),
    ("tp2", START): Bar(1.0, 1.3),
    ("tp2", KILL): Bar(1.0, 1.2, START),
    ("pp2", "itl-one"): Bar(1.0, 1.05),
    ("pp2", "rate"): Bar(2.0, 1.7, more=True),
    ("pp2", "ttft-long"): Bar(0.5, 0.62),
    ("pp2", IDLE): Bar(0.0, 0.06, ""),
    ("ep2", "balance"): Bar(1.0, 1.15, ""),
    ("dp2ep2", "rate"): Bar(None, 1.25, "dp2", more=True),
    ("dp2ep2", "kv-blocks"): Bar(None, 1.8, "tp2", more=True),
    ("tp4", "itl-one"): Bar(0.25, 0.5),
    ("tp4", "floor-one"): Bar(1.0, 0.84, "", more=True),
    ("tp4", "offline"): Bar(2.0, 1.7, "tp2", more=True),
    ("tp4", TEXTS): Bar(1.0, 1.0, "", more=True),
    ("tp2pp2", "rate"): Bar(4.0, 2.6, more=True),
    ("apart-tp2", "beside"): Bar(None, 0.33, "dp2tp2"),
    ("apart-tp2", "handover"): Bar(3.4, 5.0, ""),  # ms, of 2.7 GB
}
PEER_BAR = Bar(None, 0.9, PEER.name)
BEST_BARS: dict[tuple[int, str], Bar] = {  # of the best layout of a mixture, by number of GPUs and item
    (2, "itl-one"): Bar(0.5, 0.85),
    (2, "itl-some"): Bar(0.5, 0.66),
    (4, "rate"): Bar(4.0, 2.6, more=True),
}
SUM_BARS: dict[tuple[int, int], tuple[float | None, float | None]] = {  # us alone, with a norm; by ranks and KiB
    (2, 16): (8.0, 10.0),
    (2, 512): (None, 12.0),
    (2, 1024): (None, 14.0),
    (2, 2048): (None, 20.0),
    (4, 16): (10.0, 12.0),
    (4, 1024): (None, 16.0),
}
SUM_FLOORS = {16: 3.0, 512: 3.0, 1024: 5.0, 2048: 7.0}  # us, by KiB
TO_NCCL = {16: 0.75, 16 << 10: 1.03, 64 << 10: 1.03}  # bars of two ranks' time to NCCL's, by KiB


class ParallelRow(msgspec.Struct, frozen=True):
    """A line of the table."""

    model: str
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
        name = f"{self.model} | {self.item}: {self.what} | {self.layout}"
        if self.value is None:
            lines = [line.strip() for line in self.problem.splitlines() if line.strip()]
            return f"| {name} | {' '.join(dict.fromkeys((lines[0], lines[-1])))} | | | | | not measured |"
        base = "" if self.base_value is None else f"{self.base}: {_figure(self.base_value)} {self.unit}".rstrip()
        ratio = "" if self.ratio is None else f"{self.ratio:.3f}"
        floors = [] if self.bar is None or self.bar.floor is None else [f"{self.bar.floor:g}"]
        if self.floor is not None:
            floors.append(f"{_figure(self.floor)} {self.unit} ({self.floor / self.value:.2f} of it)")
        bar = "" if self.bar is None else f"{self.bar.bar:g}"
        verdict = {None: "", True: "met", False: "missed"}[self.is_met]
        measured = f"{_figure(self.value)} {self.unit}".rstrip()
        return f"| {name} | {measured} | {base} | {ratio} | {', '.join(floors)} | {bar} | {verdict} |"


def row_of(
    item: str, layout: str, what: str, values: Mapping[tuple[str, str], float], model: str, *, of_mixture: bool
) -> ParallelRow:
    """values: measured so far, by layout and item; that of the row is among them. of_mixture: the model has experts."""
    bar = BARS.get((layout, item))
    if of_mixture and bar is not None and bar.base == ONE.name:
        bar = None  # see `best_rows`
    base = ONE.name if bar is None else bar.base
    other = (layout, base) if base in ITEMS else (base, item)
    base_value = None if layout == ONE.name or not base else values.get(other)
    bar = None if base and base_value is None else bar  # it is one of a ratio
    return ParallelRow(model, item, layout, what, values[layout, item], ITEMS[item].unit, base, base_value, bar)


def best_rows(rows: Sequence[ParallelRow], layouts: Sequence[Layout]) -> list[ParallelRow]:
    """Returns the best rows of a mixture with their bars. rows: of its layouts."""
    num_gpus = {one.name: one.num_gpus for one in layouts}
    best = list[ParallelRow]()
    for (gpus, item), bar in BEST_BARS.items():
        found = [row for row in rows if row.item == item and num_gpus[row.layout] == gpus and row.ratio is not None]
        if found:
            one = max(found, key=lambda row: (row.ratio or 0.0) if bar.more else -(row.ratio or 0.0))
            best.append(msgspec.structs.replace(one, layout=f"{one.layout}, the best of {len(found)}", bar=bar))
    return best


def peer_row(what: str, values: Mapping[tuple[str, str], float], model: str) -> ParallelRow | None:
    """Returns the row of PEER_OF to PEER, if both are measured."""
    ours, theirs = (values.get((name, PEER_ITEM)) for name in (PEER_OF, PEER.name))
    if ours is None or theirs is None:
        return None
    return ParallelRow(model, PEER_ITEM, PEER_OF, what, ours, ITEMS[PEER_ITEM].unit, PEER.name, theirs, PEER_BAR)


def sum_rows(layout: str, num_ranks: int, times: Sequence[SumTime], model: str) -> list[ParallelRow]:
    """Rows for each size and transport: alone, with residual and norm, and compared with NCCL.

    num_ranks: each with a GPU of its own; 0 if ranks are on the CPU, which has no bars.
    """
    of_nccl = {one.num_bytes: one for one in times if one.transport == NCCL}
    rows = list[ParallelRow]()
    for one in times:
        kib, nccl = one.num_bytes // 1024, of_nccl.get(one.num_bytes)
        is_nccl = nccl is one
        bars = (None, None) if is_nccl else SUM_BARS.get((num_ranks, kib), (None, None))
        floor = sum_floor_us(one.num_bytes, num_ranks) if num_ranks else None
        what = f"{_size(kib)}, {one.transport}"
        both = ((what, one.sum_s), (f"{what}, with residual and norm", one.with_norm_s))
        for (name, seconds), most in zip(both, bars, strict=True):
            bar = None if most is None else Bar(None, most, "")
            rows.append(ParallelRow(model, SUMS, layout, name, 1e6 * seconds, "us", bar=bar, floor=floor))
        if nccl is not None and not is_nccl:
            bar = Bar(None, TO_NCCL[kib], NCCL) if num_ranks == 2 and kib in TO_NCCL else None
            compared = (1e6 * one.sum_s, "us", NCCL, 1e6 * nccl.sum_s)
            rows.append(ParallelRow(model, SUMS, layout, f"{what} to NCCL", *compared, bar))
    return rows


def sum_floor_us(num_bytes: int, num_ranks: int) -> float:
    """Returns the time of what a rank sends: a part of each step of a reduce-scatter and a gather."""
    sent = 2 * (num_ranks - 1) / num_ranks * num_bytes
    return max(SUM_FLOORS.get(num_bytes // 1024, 0.0), 1e6 * sent / LINK_BYTES_PER_S)


def idle_share(stage_itl_ms: float, tokens_per_s: float, num_running: int) -> float:
    """Returns the share of a stage's time that its steps do not take, when they take as long as those of one GPU would
    with a stage's layers. A kernel that waits for rows of another stage counts as idle.

    stage_itl_ms: of one GPU with as many rows as a stage has in a step. tokens_per_s: of the pipeline.
    """
    return 1.0 - 1e-3 * stage_itl_ms * tokens_per_s / num_running


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

"""The table of `blockyard bench pd`: each figure with its bar. Pure."""

from collections.abc import Mapping

import msgspec

from blockyard.services.bench.prefill_decode.deployments import APART, APART_UNCHECKED, ONE, TWO
from blockyard.services.bench.prefill_decode.measures import PDFigures, PDSizes, Trial, goodput

HEAD = "| what | measured | bar | from |\n|---|---|---|---|"
ITL_LIMITS = ((8.0, 1.6), (10.0, 1.0), (20.0, None))  # ms, and the bar of long prompts
SHORT_ITL_LIMIT = 10.0


class PDRow(msgspec.Struct, frozen=True):
    """A figure. `bar` is its limit; None: it is only reported."""

    what: str
    value: float
    unit: str  # empty: a ratio
    bar: float | None
    source: str  # the figures that it was computed from
    is_floor: bool = False  # the bar is a lower limit

    @property
    def is_met(self) -> bool:
        if self.bar is None:
            return True
        return self.value >= self.bar if self.is_floor else self.value <= self.bar

    def __str__(self) -> str:
        bar = "" if self.bar is None else f"{self.bar:g}" + ("" if self.is_met else " (missed)")
        return f"| {self.what} | {self.value:,.3f} {self.unit}".rstrip() + f" | {bar} | {self.source} |"


def rows_of(figures: Mapping[str, PDFigures], sizes: PDSizes) -> list[PDRow]:
    """figures: by the name of the deployment. Rows without all their figures are left out."""
    one, two = figures.get(ONE.name, PDFigures()), figures.get(TWO.name, PDFigures())
    apart, unchecked = figures.get(APART.name, PDFigures()), figures.get(APART_UNCHECKED.name, PDFigures())
    rows: list[PDRow] = []

    def ratio(what: str, value: float | None, base: float | None, bar: float, unit: str = "ms") -> None:
        if value is not None and base:
            rows.append(PDRow(what, value / base, "", bar, f"{value:,.2f} / {base:,.2f} {unit}"))

    prompt = f"prompt of {sizes.prompt:,} alone"
    beside = f"p99 ITL of {sizes.streams} streams while prompts arrive at {sizes.prompts_per_s:g} a second"
    ratio(f"{prompt}, TTFT: apart / one unified worker", apart.ttft, one.ttft, 1.02)
    if apart.exposed is not None:
        rows.append(PDRow(f"{prompt}, second token later than others", apart.exposed, "ms", 3.0,
                          f"{apart.second:,.2f} - {apart.itl:,.2f} ms"))  # fmt: skip
    if apart.exposed is not None and unchecked.exposed is not None:
        rows.append(PDRow("checksums, of it", apart.exposed - unchecked.exposed, "ms", 0.5,
                          f"{apart.exposed:,.2f} - {unchecked.exposed:,.2f} ms"))  # fmt: skip
    ratio(f"{prompt}, one token (nothing to send): apart / one", apart.one_token, one.one_token, 1.01)
    ratio(f"{beside}: apart / apart without prompts", apart.disturbed_itl, apart.stream_itl, 1.15)
    ratio(f"{beside}: apart / two unified workers", apart.disturbed_itl, two.disturbed_itl, round(1 / 3, 3))
    long = {name: one.trials_long for name, one in figures.items() if one.trials_long}
    short = {name: one.trials_short for name, one in figures.items() if one.trials_short}
    only = sizes.itl_limit_ms
    for itl_ms, bar in ITL_LIMITS if only is None else ((only, dict(ITL_LIMITS).get(only)),):
        rows += _goodput_rows(long, sizes.goodput_long, sizes.ttft_limit_ms, itl_ms, bar)
    rows += _goodput_rows(short, sizes.goodput_short, sizes.ttft_limit_ms, only or SHORT_ITL_LIMIT, None)
    return rows


def _goodput_rows(
    trials: Mapping[str, list[Trial]], lengths: tuple[int, int], ttft_ms: float, itl_ms: float, bar: float | None
) -> list[PDRow]:
    """One row if the best unified deployment has any goodput, otherwise one that reports the rate apart."""
    rates = {name: goodput(found, ttft_ms, itl_ms) for name, found in trials.items()}
    unified = {name: rate for name, rate in rates.items() if name != APART.name}
    if APART.name not in rates or not unified:
        return []
    best = max(unified, key=lambda name: unified[name])
    what = f"goodput, {lengths[0]:,} in / {lengths[1]:,} out, ITL at most {itl_ms:g} ms"
    source = f"{rates[APART.name]:g} / {unified[best]:g} requests a second ({best})"
    if not unified[best]:
        return [PDRow(f"{what}: apart; no unified step size has any", rates[APART.name], "requests/s", None, source)]
    return [PDRow(f"{what}: apart / best of two unified", rates[APART.name] / unified[best], "", bar, source, True)]

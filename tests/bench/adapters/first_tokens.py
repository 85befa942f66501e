"""How much later a request's first token comes if its adapter has no place yet."""

import itertools

from adapters.adapted_server import IN_HOST, PLACES, AdaptedServer
from rig import Row, median


def from_host_memory(served: AdaptedServer) -> list[Row]:
    """Adapters in host memory, more of them than places, in turn."""
    pairs = _pairs(served, range(PLACES + 2))
    copy_s, _ = served.copy_seconds()
    return [_row(pairs, "from host memory, to a plain copy of its bytes", copy_s, 4)]


def from_disk(served: AdaptedServer) -> list[Row]:
    """Adapters in turn, more of them than host memory holds: their files are cached."""
    pairs = _pairs(served, range(IN_HOST + 4))
    _, read_s = served.copy_seconds()
    return [_row(pairs, "from cached disk, to `safetensors` read and copy", read_s, 3)]


def _row(pairs: list[tuple[float, float]], what: str, base_s: float, bar: float) -> Row:
    later_s = median([first - second for first, second in pairs])
    resident = median([second for _, second in pairs])
    text = f"{later_s / base_s:.2f} times ({1e3 * later_s:.1f} to {1e3 * base_s:.1f} ms; resident {1e3 * resident:.1f})"
    return f"first token beyond a resident adapter's, {what}", text, f"{bar} times"


def _pairs(served: AdaptedServer, adapters: range) -> list[tuple[float, float]]:
    """TTFT of two requests with each adapter, one after the other. All are used once before."""
    for adapter in adapters:
        served.first_token_s(adapter, seed=-1 - adapter)
    found = list[tuple[float, float]]()
    for seed, adapter in zip(range(0, 2 * served.sizes.num_pairs, 2), itertools.cycle(adapters), strict=False):
        found.append((served.first_token_s(adapter, seed), served.first_token_s(adapter, seed + 1)))
    return found

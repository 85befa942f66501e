"""A picture of 16 streams while a long prompt arrives: two unified workers above, prefill and decode apart below.

`python tests/bench/handovers/draw_roles.py [--svg FILE] [--worker-flags '--flag value']`, with two GPUs. Each mark
is one token as the client received it; the band is the time from sending the long prompt to its first token. Weights of
the 8B are random.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from blockyard.services.bench.load.results import RequestResult
from blockyard.services.bench.prefill_decode.deployments import APART, TWO
from blockyard.services.bench.suite import shapes
from blockyard.services.bench.suite.served import random_requests, serve

FLAGS = ("--no-enable-prefix-caching", "--max-model-len", "16384")
STREAMS, PROMPT = 16, 8192
BEFORE_S, SHOWN_S = 0.15, 0.6  # of the picture, from the time when the prompt is sent
WIDTH, LEFT, ROW = 900, 70, 9


def timeline(model: Path, flags: Sequence[str], folder: Path) -> list[RequestResult]:
    """16 streams, then the long prompt, which is the last result."""
    streams = random_requests(STREAMS, 256, 512, seed=1)
    with serve(model, flags, folder / "server.log") as served:
        server = served.complete()
        server.stream(random_requests(2, PROMPT, 8, seed=-1), each_token=False)  # what happens on first use only
        asked, due_s = [*streams, *random_requests(1, PROMPT, 8, seed=2)], [0.0] * STREAMS + [1.0]
        return server.stream(asked, each_token=False, due_s=due_s)  # a token without text has no mark


def longest_gap_ms(results: list[RequestResult]) -> float:
    """The longest gap of the streams, from the time when the prompt is sent to its first token."""
    *streams, prompt = results
    return 1000 * max(
        later - earlier
        for one in streams
        for earlier, later in zip(one.tokens_s, one.tokens_s[1:], strict=False)
        if later >= prompt.sent_s and earlier <= prompt.tokens_s[0]
    )


def panel(results: list[RequestResult], title: str, top: int) -> list[str]:
    *streams, prompt = results
    begin = prompt.sent_s - BEFORE_S

    def x(at: float) -> float:
        return LEFT + WIDTH * (at - begin) / SHOWN_S

    height = ROW * STREAMS
    marks = "".join(
        f"M{x(at):.1f} {top + 22 + ROW * row}v{ROW - 3}"
        for row, one in enumerate(streams)
        for at in one.tokens_s
        if 0 <= at - begin <= SHOWN_S
    )
    band = f'<rect x="{x(prompt.sent_s):.1f}" y="{top + 18}" width="{x(prompt.tokens_s[0]) - x(prompt.sent_s):.1f}"'
    return [
        f'<text x="{LEFT}" y="{top + 12}" font-size="13">{title}; longest gap {longest_gap_ms(results):.0f} ms</text>',
        f'{band} height="{height + 6}" fill="#f4d9a8"/>',
        f'<path d="{marks}" stroke="#2471a3" stroke-width="1.2"/>',
        f'<text x="{LEFT - 8}" y="{top + 30}" text-anchor="end">stream 1</text>',
        f'<text x="{LEFT - 8}" y="{top + 18 + height}" text-anchor="end">{STREAMS}</text>',
    ]


def draw(unified: list[RequestResult], apart: list[RequestResult]) -> str:
    step = ROW * STREAMS + 44
    axis = "".join(
        f'<text x="{LEFT + WIDTH * ms / (1000 * SHOWN_S):.0f}" y="{2 * step + 22}" text-anchor="middle">{ms} ms</text>'
        for ms in range(0, round(1000 * SHOWN_S) + 1, 100)
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 20}" height="{2 * step + 30}"'
            ' font-family="sans-serif" font-size="10"><rect width="100%" height="100%" fill="white"/>',
            *panel(unified, "Two unified workers", 10),
            *panel(apart, "A prefill worker and a decode worker", 10 + step),
            axis + "</svg>",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b", choices=sorted(shapes.SHAPES))
    parser.add_argument("--worker-flags", default="")
    parser.add_argument("--svg", type=Path, default=Path("roles.svg"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        model = shapes.write(args.model, Path(name))
        unified, apart = (
            timeline(model, (*FLAGS, *deployment.flags, *args.worker_flags.split()), Path(name))
            for deployment in (TWO, APART)
        )
    args.svg.write_text(draw(unified, apart) + "\n")
    print(f"longest gap of {STREAMS} streams while a prompt of {PROMPT} tokens is computed:")
    print(f"{longest_gap_ms(unified):.1f} ms with two unified workers, {longest_gap_ms(apart):.1f} ms apart")


if __name__ == "__main__":
    main()

"""Time to the first token of a prompt whose beginning was seen before, against one that is new: demo model on CPU."""

import random

from raw_client import raw_streams
from rig import Row, Server, completion, median, serve, table

NUM_SHARED, NUM_OWN = 3000, 8
ROUNDS = 5


def first_token_s(server: Server, prompt: list[int]) -> float:
    (log,) = raw_streams(server.url, [completion(4, prompt=prompt)])
    return log.events()[0][0] - log.started_s


def prefix_rows() -> list[Row]:
    """Each round: a new prompt, then another that differs in its last few tokens. Interleaved, one server."""
    ids = random.Random(0)
    new, seen, ratios = [], [], []
    with serve("demo", "--dtype", "float32") as server:
        for _ in range(ROUNDS + 1):  # the first warms up
            shared = ids.choices(range(100, 4000), k=NUM_SHARED)
            new.append(first_token_s(server, shared + ids.choices(range(100, 4000), k=NUM_OWN)))
            seen.append(first_token_s(server, shared + ids.choices(range(100, 4000), k=NUM_OWN)))
            ratios.append(seen[-1] / new[-1])
    text = (
        f"{median(ratios[1:]):.3f} ({1000 * median(seen[1:]):.0f} ms against {1000 * median(new[1:]):.0f} ms, "
        f"{ROUNDS} pairs: {min(ratios[1:]):.3f} to {max(ratios[1:]):.3f})"
    )
    return [(f"TTFT with {NUM_SHARED} shared prompt tokens against a new prompt, demo model, CPU", text, "0.15")]


if __name__ == "__main__":
    print(table(prefix_rows()))

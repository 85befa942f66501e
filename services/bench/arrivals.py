"""When requests are sent."""

import itertools
import math
import random


def due_times(num: int, rate: float, burstiness: float, rng: random.Random) -> list[float]:
    """Seconds after the start at which each of `num` requests is due, ascending.

    `rate` requests a second; inf: all at once. The gaps are gamma distributed with shape `burstiness`: 1 is a Poisson
    process, less comes in bursts, inf is a steady beat. The last is due at exactly `num / rate`, as in vLLM, so that
    the load does not depend on the seed.
    """
    if math.isinf(rate):
        return [0.0] * num
    gaps = [1.0 if math.isinf(burstiness) else rng.gammavariate(burstiness, 1.0) for _ in range(num)]
    times = list(itertools.accumulate(gaps))
    scale = num / rate / times[-1] if times else 0.0
    return [at * scale for at in times]

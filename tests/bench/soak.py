"""Kills services at random under load for a while and checks every stream's text. `soak.py [seconds] [streams]`."""

import asyncio
import os
import random
import signal
import sys
import time

import aiohttp
from rig import Server, completion, serve, stream

VICTIMS = ("detokenizer", "gpu_worker", "scheduler", "tokenizer_pool", "message_bus")
NUM_BODIES = 16
FLAGS = ("--worker-cls", "mock", "--mock-step-ms", "10", "--detokenizers", "2", "--tokenizers", "2")


def body(index: int) -> dict[str, object]:
    return completion(60 + 15 * (index % 8), prompt=f"def stream_{index}():", seed=index)


async def client(session: aiohttp.ClientSession, server: Server, index: int, until: float, texts: list[str]) -> int:
    """Asks one after another; every answer must be what the same body gave undisturbed."""
    done = 0
    while time.monotonic() < until:
        index = (index + 7) % NUM_BODIES
        log = await asyncio.wait_for(stream(session, server.url, body(index)), 90)
        assert log.text == texts[index], f"stream {index} changed its text"
        done += 1
    return done


async def killer(server: Server, until: float, rng: random.Random) -> list[str]:
    killed = []
    while time.monotonic() < until:
        await asyncio.sleep(rng.uniform(0.05, 2.0))
        children = server.children()
        titles = [t for t in children if any(v in t for v in VICTIMS)]
        if titles:
            title = rng.choice(titles)
            os.kill(children[title], signal.SIGKILL)
            killed.append(title.removeprefix("blockyard: "))
    return killed


async def soak(server: Server, seconds: float, num_streams: int) -> None:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(100)) as session:
        texts = [(await stream(session, server.url, body(index))).text for index in range(NUM_BODIES)]
        until = time.monotonic() + seconds
        clients = [client(session, server, i, until, texts) for i in range(num_streams)]
        killed, *done = await asyncio.gather(killer(server, until, random.Random(0)), *clients)
    print(
        f"{sum(done)} streams of {num_streams} clients ended as they should; killed {len(killed)}: {', '.join(killed)}"
    )


if __name__ == "__main__":
    seconds, num_streams = (float(sys.argv[1]) if len(sys.argv) > 1 else 60.0), int((sys.argv[2:] or ["24"])[0])
    with serve("demo", *FLAGS) as ring:
        asyncio.run(soak(ring, seconds, num_streams))

"""A server with adapters that have the model's shapes, more of them than its host memory holds."""

import contextlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from blockyard.services.bench.load.results import BenchError, RequestResult
from blockyard.services.bench.suite import adapters, shapes
from blockyard.services.bench.suite.served import SuiteServer, random_requests, serve

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
COPIES_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class BenchSizes:
    """Numbers of adapters and requests, and tokens."""

    num_pairs: int  # first tokens of each kind
    num_prompt: int  # tokens of the prompts of these, and of those that load adapters
    num_streams: int  # beside loads
    context: int  # tokens of their prompts
    loads_per_s: float
    loads_s: float  # how long adapters are loaded
    num_popular: int  # adapters that are named by Zipf's law
    num_places: int  # for them
    num_host: int  # of them in host memory
    num_requests: int  # that name them
    most_running: int  # of these requests at a time
    lengths: tuple[int, int]  # of these: tokens in and out


OF_DEVICE = BenchSizes(24, 64, 32, 256, 20, 8, 1000, 32, 256, 2000, 64, (512, 128))
SMALL = BenchSizes(8, 16, 4, 64, 10, 4, 60, 6, 24, 160, 8, (32, 16))
NUM_LOADED, PLACES, IN_HOST = 48, 8, 16  # adapters of all linear layers


class AdaptedServer(contextlib.AbstractContextManager["AdaptedServer"]):
    """Runs `blockyard serve` once it is asked for the first time."""

    def __init__(
        self,
        model: str,
        flags: Sequence[str],
        folder: Path,
        sizes: BenchSizes,
        left_s: Callable[[], float],
        *,
        is_popularity: bool = False,
    ) -> None:
        """left_s: after which the server is killed. is_popularity: many adapters of attention alone, of rank 8."""
        self.sizes, self.flags, self._left_s, self._is_popularity = sizes, tuple(flags), left_s, is_popularity
        self._model, self._folder = model, folder
        self.max_model_len = 4096 if model == "demo" else 8192
        self.names = adapters.names(sizes.num_popular if is_popularity else NUM_LOADED)
        self._file = folder  # of an adapter's matrices, once they are written
        self._stack = contextlib.ExitStack()
        self._served: SuiteServer | None = None
        self._failure: BenchError | None = None  # of its start

    @property
    def served(self) -> SuiteServer:
        if self._failure is not None:
            raise self._failure  # another start would take as long
        if self._served is None:
            try:
                self._served = self._stack.enter_context(self._start()).complete()
            except BenchError as e:
                self._failure = e
                raise
            print(f"ready with {len(self.names)} adapters after {self._served.full_s:.0f} s", file=sys.stderr)
        return self._served

    def _start(self) -> contextlib.AbstractContextManager[SuiteServer]:
        model, rank = shapes.find(self._model, self._folder), 8 if self._is_popularity else 16
        places, host = (self.sizes.num_places, self.sizes.num_host) if self._is_popularity else (PLACES, IN_HOST)
        config: dict[str, Any] = msgspec.json.decode((model / "config.json").read_bytes())
        ranks, made = [rank] * len(self.names), self._folder / ("some" if self._is_popularity else "all")
        folders = adapters.write_folders(config, ranks, made, attention_only=self._is_popularity)
        self._file = folders[0] / "adapter_model.safetensors"
        own = ["--no-enable-prefix-caching", "--max-model-len", str(self.max_model_len), "--max-loras", str(places)]
        own += ["--max-cpu-loras", str(host), "--max-lora-rank", str(rank), *self.flags]
        own += ["--lora-target-modules", *ATTENTION] if self._is_popularity else []
        modules = [f"{name}={path}" for name, path in zip(self.names, folders, strict=True)]
        return serve(model, [*own, "--lora-modules", *modules], made.with_suffix(".log"), self._left_s())

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def first_token_s(self, adapter: int, seed: int) -> float:
        """TTFT of a request alone."""
        requests = random_requests(1, self.sizes.num_prompt, 1, seed)
        [found] = self.served.stream(requests, each_token=False, models=[self.names[adapter]])
        return ttft_s(found)

    def copy_seconds(self) -> tuple[float, float]:
        """Seconds of a plain copy of an adapter's bytes to the device, and of reading its file and copying it.

        The server has started.
        """
        device = "cpu" if "cpu" in self.flags else "cuda"
        command = [sys.executable, str(Path(__file__).parent / "plain_copies.py"), device]
        command.append(str(self._file))
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=COPIES_LIMIT_S)
        if done.returncode:
            raise RuntimeError(f"plain copies ended with {done.returncode}: {done.stderr[-500:].strip()}")
        copy_s, read_s = map(float, done.stdout.split())
        return copy_s, read_s


def ttft_s(result: RequestResult) -> float:
    return result.tokens_s[0] - result.sent_s

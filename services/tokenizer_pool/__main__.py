"""`python -m blockyard.services.tokenizer_pool SETTINGS`: runs one replica of the tokenizer pool."""

import asyncio
import gc
import socket
import sys

import uvloop

from blockyard.services.tokenizer_pool import fork_server
from blockyard.services.tokenizer_pool.grammar_checks import GrammarChecks
from blockyard.services.tokenizer_pool.job_limits import MIB, JobLimits
from blockyard.services.tokenizer_pool.service import TokenizerPool
from blockyard.services.tokenizer_pool.text_process import TextProcess
from blockyard.shared.bus.links import Links
from blockyard.shared.config.services.tokenizer import TokenizerConfig
from blockyard.shared.messages import Role, TokenizerIn
from blockyard.shared.process import settings
from blockyard.shared.process.service_main import publish, run_until_stopped

LIMITS = JobLimits()
GRAMMAR_LIMITS = JobLimits(memory_bytes=512 * MIB, memory_bytes_per_token=0)


async def serve_async(config: TokenizerConfig, control: socket.socket) -> None:
    model = config.served_model_names[0] if config.served_model_names else ""
    links: Links[TokenizerIn] = Links(config.process.name, Role.TOKENIZER_POOL, config.process.bus, TokenizerIn, model)
    with links:
        links.update(phase="loading tokenizer")
        worker = TextProcess(control, LIMITS)
        notes = await worker.load()
        checks = GrammarChecks(config, GRAMMAR_LIMITS)
        pool = TokenizerPool(links, worker, config.served_model_names, checks)
        gc.collect()
        gc.freeze()
        links.update(ready=True, phase="ready", progress=1.0, notes=notes)
        serving = (worker.run(pool.on_answer), checks.run(pool.on_verdict))
        await run_until_stopped(pool.run(links), *serving, publish(pool.count))


def serve(config: TokenizerConfig) -> None:
    control = fork_server.start(config, LIMITS)  # first: a process with threads must not be forked
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve_async(config, control))


if __name__ == "__main__":
    sys.exit(settings.run(TokenizerConfig, serve))

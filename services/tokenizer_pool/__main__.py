"""`python -m blockyard.services.tokenizer_pool SETTINGS`: runs one replica of the tokenizer pool."""

import asyncio
import gc
import sys

import uvloop

from blockyard.services.tokenizer_pool.grammar_checks import GrammarChecks
from blockyard.services.tokenizer_pool.service import TokenizerPool
from blockyard.services.tokenizer_pool.workers.fork_server import ServerSettings
from blockyard.services.tokenizer_pool.workers.job_limits import MIB, JobLimits
from blockyard.services.tokenizer_pool.workers.job_workers import JobWorkers
from blockyard.shared.bus.links import Links
from blockyard.shared.config.services.tokenizer import TokenizerConfig
from blockyard.shared.errors import BlockyardError
from blockyard.shared.messages import Role, TokenizerIn
from blockyard.shared.process import settings
from blockyard.shared.process.liveness import LivenessPipe
from blockyard.shared.process.service_main import publish, run_until_stopped

TEXT_MODULE = "blockyard.services.tokenizer_pool.text_worker"
LIMITS = JobLimits()
GRAMMAR_LIMITS = JobLimits(memory_bytes=512 * MIB, memory_bytes_per_token=0)


async def serve_async(config: TokenizerConfig) -> None:
    model = config.served_model_names[0] if config.served_model_names else ""
    process, liveness = config.process, LivenessPipe(config.process.liveness_fd)
    links: Links[TokenizerIn] = Links(
        process.name, Role.TOKENIZER_POOL, process.bus, TokenizerIn, model, liveness=liveness
    )
    with links:
        links.update(phase="loading tokenizer")
        workers = JobWorkers(TEXT_MODULE, ServerSettings(config=config, limits=LIMITS))
        checks = GrammarChecks(config, GRAMMAR_LIMITS)
        checks.start()
        notes = await workers.load()
        pool = TokenizerPool(links, workers, config.served_model_names, checks)
        gc.collect()
        gc.freeze()
        links.update(ready=True, phase="ready", progress=1.0, notes=notes)
        serving = (workers.run(pool.on_answer), checks.run(pool.on_verdict))
        try:
            await run_until_stopped(pool.run(links), *serving, publish(pool.count))
        except* BlockyardError as group:
            raise group.exceptions[0] from None


def serve(config: TokenizerConfig) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve_async(config))


if __name__ == "__main__":
    sys.exit(settings.run(TokenizerConfig, serve))

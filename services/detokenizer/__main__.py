"""`python -m blockyard.services.detokenizer SETTINGS`: token ids to text, stop strings."""

import asyncio
import gc
import sys

import uvloop

from blockyard.services.detokenizer.service import Detokenizer
from blockyard.services.detokenizer.token_table import TokenTable
from blockyard.shared import tokenizer_files
from blockyard.shared.bus.links import Links
from blockyard.shared.config.services.detokenizer import DetokenizerConfig
from blockyard.shared.messages import DetokenizerIn, Role
from blockyard.shared.process import settings
from blockyard.shared.process.liveness import LivenessPipe
from blockyard.shared.process.service_main import publish, run_until_stopped


async def serve_async(config: DetokenizerConfig) -> None:
    model = config.served_model_names[0] if config.served_model_names else ""
    process, liveness = config.process, LivenessPipe(config.process.liveness_fd)
    links: Links[DetokenizerIn] = Links(
        process.name, Role.DETOKENIZER, process.bus, DetokenizerIn, model, liveness=liveness
    )
    with links:
        links.update(phase="loading tokenizer")
        files = tokenizer_files.load(config.tokenizer_path)
        table = TokenTable(files.tokenizer, files.vocab_size)
        detokenizer = Detokenizer(links, table, config.served_model_names)
        gc.collect()
        gc.freeze()
        notes = [f"vocabulary {files.vocab_size}", f"decoder {table.decoding.kind.name.lower()}"]
        links.update(ready=True, phase="ready", progress=1.0, notes=notes)
        await run_until_stopped(detokenizer.run(links), publish(detokenizer.count))


def serve(config: DetokenizerConfig) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve_async(config))


if __name__ == "__main__":
    sys.exit(settings.run(DetokenizerConfig, serve))

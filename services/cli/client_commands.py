"""The commands that run a model or load a server themselves, and the tables of `api`.

They load the offline engine, an HTTP client, the load generators or the gateway, which takes 0.1 s: `main` imports
this module for them alone.
"""

from blockyard.services.api_gateway import api_tables
from blockyard.services.bench import command as bench
from blockyard.services.bench import simulate
from blockyard.services.launcher.batches import run_batch
from blockyard.services.offline.commands import quantize, tune

MAINS = {
    "run-batch": run_batch.main,
    "bench": bench.main,
    "quantize": quantize.main,
    "simulate": simulate.main,
    "tune": tune.main,
    "api": api_tables.TABLES.command,
}

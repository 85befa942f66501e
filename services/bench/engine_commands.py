"""The benchmarks that run a model through `blockyard.LLM` or the server's launcher: `latency`, `throughput`, `suite`,
`parallel`.

They load tokenizers, whose memory and time the load of `serve` would share: `command` imports this module for them
alone.
"""

from blockyard.services.bench import latency_throughput
from blockyard.services.bench.parallel import command as parallel
from blockyard.services.bench.suite import command as suite

MAINS = {
    "latency": latency_throughput.latency,
    "throughput": latency_throughput.throughput,
    "suite": suite.main,
    "parallel": parallel.main,
}

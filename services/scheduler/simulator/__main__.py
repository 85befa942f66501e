"""`python -m blockyard.services.scheduler.simulator SETTINGS`: one simulation, its table and its report."""

import gc
import sys
import time
from pathlib import Path

from blockyard.services.scheduler.simulator import goodput, report
from blockyard.services.scheduler.simulator.simulation import Simulation
from blockyard.services.scheduler.simulator.trace import TraceRequest, read_trace
from blockyard.shared import charts
from blockyard.shared.config.services.simulation import LatencyLimits, SimulationConfig
from blockyard.shared.errors import ConfigError
from blockyard.shared.process import pipes, settings

SHEET = 4  # charts for a document: queue, batch, blocks, throughput


def simulate(config: SimulationConfig) -> None:
    requests = read_trace(Path(config.trace))
    gc.disable()  # a collection scans the whole simulation
    searched = ""
    if config.goodput is not None:
        searched, config, requests = _search(config, config.goodput, requests)
    simulation = Simulation(config, requests)
    began = time.perf_counter()
    simulation.run()
    summary = report.summarize(simulation, time.perf_counter() - began)
    text = report.table(config, simulation, summary)
    print(text)
    text = searched + text
    drawn = report.charts(simulation)
    if config.html:
        _write(config.html, charts.page(f"blockyard simulate {Path(config.trace).name}", text, drawn))
        print(f"\nreport      {config.html}")
    if config.svg:
        _write(config.svg, charts.sheet(drawn[:SHEET]))


def _search(
    config: SimulationConfig, limits: LatencyLimits, requests: list[TraceRequest]
) -> tuple[str, SimulationConfig, list[TraceRequest]]:
    """Prints how the setups compare. Returns that text, and the simulation of the best one at its goodput."""
    lines = [goodput.head(limits)]
    print(lines[0])

    def add(line: str) -> None:
        lines.append(line)
        print(line, flush=True)

    search = goodput.GoodputSearch(config, requests, limits, lambda found: add(goodput.row(found)))
    apart, together = search.best(*goodput.splits(config)), search.best(*goodput.unified(config))
    add(f"{goodput.conclusion(apart, together)}\n")
    best = max(apart, together, key=lambda found: (not found.is_less, found.per_s))
    return "\n".join([*lines, ""]), goodput.setup_config(config, best.setup), search.at_rate(best.per_s)


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, "utf-8")
    except OSError as e:
        raise ConfigError(f"{path}: {e.strerror}") from e


if __name__ == "__main__":
    sys.exit(pipes.exit_code_of(lambda: settings.run(SimulationConfig, simulate)))

"""`python -m blockyard.services.scheduler.simulator SETTINGS`: one simulation, its table and its report."""

import gc
import sys
import time
from pathlib import Path

from blockyard.services.scheduler.simulator import report
from blockyard.services.scheduler.simulator.simulation import Simulation
from blockyard.services.scheduler.simulator.trace import read_trace
from blockyard.shared import charts
from blockyard.shared.config.services.simulation import SimulationConfig
from blockyard.shared.errors import ConfigError
from blockyard.shared.process import pipes, settings

SHEET = 4  # charts for a document: queue, batch, blocks, throughput


def simulate(config: SimulationConfig) -> None:
    requests = read_trace(Path(config.trace))
    simulation = Simulation(config, requests)
    gc.disable()  # there are no cycles to collect, and a collection scans the whole simulation
    began = time.perf_counter()
    simulation.run()
    summary = report.summarize(simulation, time.perf_counter() - began)
    text = report.table(config, simulation, summary)
    print(text)
    drawn = report.charts(simulation)
    if config.html:
        _write(config.html, charts.page(f"blockyard simulate {Path(config.trace).name}", text, drawn))
        print(f"\nreport      {config.html}")
    if config.svg:
        _write(config.svg, charts.sheet(drawn[:SHEET]))


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, "utf-8")
    except OSError as e:
        raise ConfigError(f"{path}: {e.strerror}") from e


if __name__ == "__main__":
    sys.exit(pipes.exit_code_of(lambda: settings.run(SimulationConfig, simulate)))

"""Goodput trials of several runs, one JSON line each in a file, so that a table can be measured piece by piece."""

from pathlib import Path

import msgspec

from blockyard.services.bench.prefill_decode.measures import Lengths, PDFigures, PDSizes, Trial
from blockyard.shared.errors import ConfigError


class LoggedTrial(msgspec.Struct, frozen=True):
    """A trial and what it was measured of."""

    server: str
    num_input: int
    num_output: int
    num_requests: int
    trial: Trial

    def __str__(self) -> str:
        it = self.trial
        return (
            f"{self.server}: {self.num_requests} requests of {self.num_input:,} / {self.num_output:,} tokens at"
            f" {it.rate:g} a second: p99 TTFT {it.ttft_ms:,.0f} ms, p99 ITL {it.itl_ms:,.2f} ms"
        )


class TrialLog:
    """Trials of this run, and of earlier runs from its file."""

    def __init__(self, path: Path | None, num_requests: int) -> None:
        """num_requests: of each trial; trials of another size are not compared. Raises ConfigError for a file that
        cannot be read."""
        self._path, self._num_requests = path, num_requests
        self._trials: list[LoggedTrial] = []
        if path is None or not path.exists():
            return
        try:
            lines = path.read_bytes().splitlines()
            self._trials = [msgspec.json.decode(line, type=LoggedTrial) for line in lines if line.strip()]
        except (OSError, msgspec.DecodeError) as e:
            raise ConfigError(f"--trials {path}: {e}") from e

    def add(self, server: str, lengths: Lengths, trial: Trial) -> None:
        """Prints and keeps a trial. Raises ConfigError if the file cannot be written."""
        logged = LoggedTrial(server, *lengths, self._num_requests, trial)
        print(logged, flush=True)
        self._trials.append(logged)
        if self._path is not None:
            try:
                with self._path.open("ab") as file:
                    file.write(msgspec.json.encode(logged) + b"\n")
            except OSError as e:
                raise ConfigError(f"--trials {self._path}: {e}") from e

    def add_to(self, figures: dict[str, PDFigures], sizes: PDSizes) -> None:
        """Enters all trials of these sizes in the figures of their servers, by rate. A later one of a rate counts."""
        for server in dict.fromkeys(one.server for one in self._trials):
            mine = figures.setdefault(server, PDFigures())
            mine.trials_long = self._of(server, sizes.goodput_long)
            mine.trials_short = self._of(server, sizes.goodput_short)

    def _of(self, server: str, lengths: Lengths) -> list[Trial]:
        wanted = (server, *lengths, self._num_requests)
        found = {
            one.trial.rate: one.trial
            for one in self._trials
            if (one.server, one.num_input, one.num_output, one.num_requests) == wanted
        }
        return [found[rate] for rate in sorted(found)]

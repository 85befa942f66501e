"""`blockyard run-batch`: answers the requests of a file with a ring of its own."""

import argparse
import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from setproctitle import setproctitle

from blockyard.services.launcher import executors
from blockyard.services.launcher.batches import remote_files
from blockyard.services.launcher.models import model_files
from blockyard.services.launcher.serve import RUN_ONLY, make_display, read_values, run_ring
from blockyard.services.launcher.supervision.ring import Ring, local_bus
from blockyard.services.launcher.supervision.run_dir import RunDir
from blockyard.shared.config.parsed_flags import Values
from blockyard.shared.config.resolve import Deployment, resolve
from blockyard.shared.config.server import log_settings
from blockyard.shared.config.services.batch import BatchConfig
from blockyard.shared.errors import BatchError, ConfigError
from blockyard.shared.process import logs

HTTP_ONLY = ("host", "port", "uds", "metrics-port", "api-key", "api-key-file", "admin-key", "admin-key-file")
PIECE_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class BatchFiles:
    """The places that the user named, and the local files that the ring works with."""

    given_input: str
    given_output: str
    input: Path
    output: Path

    @classmethod
    def of(cls, given_input: str, given_output: str, folder: Path) -> "BatchFiles":
        """`folder` gets the local files of URLs."""
        local_input = folder / "input.jsonl" if remote_files.is_url(given_input) else Path(given_input).absolute()
        local_output = folder / "output.jsonl" if remote_files.is_url(given_output) else Path(given_output).absolute()
        return cls(given_input, given_output, local_input, local_output)

    @property
    def output_is_remote(self) -> bool:
        return remote_files.is_url(self.given_output)

    def has_answers(self) -> bool:
        return self.output.exists() and self.output.stat().st_size > 0

    def prepare(self, resumes: bool) -> None:
        """Makes the local files: all of the input, and what the output has so far. Raises ConfigError."""
        shown_input, shown_output = remote_files.shown(self.given_input), remote_files.shown(self.given_output)
        if remote_files.is_url(self.given_input):
            asyncio.run(remote_files.fetch(self.given_input, self.input))
        if self.input.exists() and not self.input.is_file():
            raise ConfigError(f"-i {shown_input}: is no regular file")
        try:
            with self.input.open("rb") as file:
                if not any(piece.strip() for piece in iter(lambda: file.read(PIECE_BYTES), b"")):
                    raise ConfigError(f"-i {shown_input}: has no lines")
        except OSError as e:
            raise ConfigError(f"-i {shown_input}: {e.strerror}") from e
        if resumes and self.output_is_remote:
            asyncio.run(remote_files.fetch(self.given_output, self.output, may_be_missing=True))
        try:
            if self.output.exists() and self.output.samefile(self.input):
                raise ConfigError(f"-o {shown_output}: is the input")
            with self.output.open("ab" if resumes else "wb"):
                pass
        except OSError as e:
            raise ConfigError(f"-o {shown_output}: {e.strerror}") from e

    def deliver(self) -> None:
        """Sends the output where it is a URL. Raises BatchError."""
        if self.output_is_remote:
            asyncio.run(remote_files.send(self.output, self.given_output))


def main(args: Sequence[str]) -> int:
    """Returns once every line is answered, also where answers are errors. Raises BlockyardError."""
    try:
        own, rest = _parser().parse_known_args(list(args))
    except argparse.ArgumentError as e:
        raise ConfigError(str(e)) from e
    if own.input_file is None or own.output_file is None:
        raise ConfigError("-i INPUT and -o OUTPUT are needed")
    values, notes = read_values(rest)
    for name in RUN_ONLY:
        if values.is_given(name):
            raise ConfigError(f"{values.where(name)}: is for `blockyard run`; run-batch starts its own ring")
    if values.get("api-gateways", int) > 1:
        raise ConfigError(f"{values.where('api-gateways')}: one gateway reads the file of a batch")
    notes += [
        f"{values.where(name)}: has no effect, a batch is not listening" for name in HTTP_ONLY if values.is_given(name)
    ]
    folder = Path(tempfile.mkdtemp(prefix="batch-"))
    files = BatchFiles.of(own.input_file, own.output_file, folder)
    try:
        _answer(files, values, notes, own.max_lines, own.resume)
    except BaseException:
        if files.output_is_remote and files.has_answers():
            files.deliver()
        shutil.rmtree(folder, ignore_errors=True)
        raise
    files.deliver()  # if it fails, the folder has the only copy of the output
    shutil.rmtree(folder, ignore_errors=True)
    return 0


def _answer(files: BatchFiles, values: Values, notes: list[str], max_lines: int | None, resumes: bool) -> None:
    with RunDir(values.maybe("run-dir", str)) as run_dir:
        deployment = with_batch(resolve(values, model_files.find(values), local_bus(run_dir.path)), files, max_lines)
        workers = executors.choose(deployment.workers, values, os.environ)
        deployment = msgspec.structs.replace(deployment, workers=workers)
        setproctitle("blockyard: launcher")
        logs.setup("launcher", log_settings.log_level(values), log_settings.config_file(values))
        display = make_display(deployment, sys.stdout, values.get("use-tqdm-on-load", bool))
        for note in (*notes, *deployment.notes):
            display.say(note)
        files.prepare(resumes)  # after all that can be wrong with flags: it empties the output
        ring = Ring(deployment, run_dir.path, display)
        served = ", ".join(deployment.gateways[0].served_model_names)
        line = f"{served} answers {remote_files.shown(files.given_input)}"
        asyncio.run(run_ring(ring, display, values, line))
        if not ring.supervisor.job_ended.is_set():
            raise BatchError("stopped before the last line; --resume goes on")
        if ring.supervisor.job_error:
            raise BatchError(f"{ring.supervisor.job_error}; --resume goes on")


def with_batch(deployment: Deployment, files: BatchFiles, max_lines: int | None) -> Deployment:
    """Returns the deployment with one gateway, which reads the input. `max_lines`: None: four for each slot."""
    if max_lines is None:
        max_lines = 4 * deployment.scheduler.max_num_seqs * len(deployment.workers)
    batch = BatchConfig(input=str(files.input), output=str(files.output), max_lines=max_lines)
    return msgspec.structs.replace(deployment, gateways=[msgspec.structs.replace(deployment.gateways[0], batch=batch)])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "blockyard run-batch",
        description="Answers the requests of a file in OpenAI's batch format, with the model of --model.",
        epilog="All other flags are those of `blockyard serve`: `blockyard serve --help` lists them.",
        allow_abbrev=False,
        exit_on_error=False,
    )
    add = parser.add_argument
    add("-i", "--input-file", metavar="INPUT", help="a file or an http URL: a request a line")
    add("-o", "--output-file", metavar="OUTPUT", help="a file, or an http URL that takes PUT; it is replaced")
    add("--resume", action="store_true", help="keep what OUTPUT has, and leave out each custom_id in it")
    add(
        "--max-lines",
        type=_count,
        help="lines that are answered at a time (four times --max-num-seqs, for each worker)",
    )
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return int(text)

"""The command line: `blockyard COMMAND`. A wrong flag is one line on stderr and exit code 2."""

import difflib
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import blockyard
from blockyard.services.launcher import multi_host, serve
from blockyard.shared.config import model_documents, parser_documents, quantization_documents
from blockyard.shared.config.flags import documents, vllm_only
from blockyard.shared.errors import BlockyardError, ConfigError
from blockyard.shared.process import pipes

USAGE = """\
usage: blockyard serve [MODEL] [flags]    serve a model on this machine
       blockyard run-batch -i IN -o OUT   answer a file of requests in OpenAI's batch format (--resume, flags of serve)
       blockyard bench WHAT [flags]       measure a server, a model or the GPU: serve, latency, suite, ...
       blockyard tune MODEL [flags]       compile GPU kernels and tune layers ahead of a start (--kernel-cache)
       blockyard quantize MODEL OUT       write a quantized checkpoint of a 16-bit one: --to fp8, fp8-block, int8, w4
       blockyard simulate TRACE [flags]   run the scheduler on a trace in virtual time and report
       blockyard run SERVICE [flags]      run one process of a ring over several machines or containers
       blockyard ring [--check]           list the members of that ring; --check: is this host's part ready
       blockyard keys DIR                 write the key pair that all members of such a ring share
       blockyard flags [--markdown]       list every flag, also refused ones with the reason; --quantization: its names
       blockyard parsers                  list the formats of tool calls and of reasoning
       blockyard models                   list the supported model architectures
       blockyard api                      list the routes of the server and the fields of their bodies
       blockyard version

MODEL is a folder, a name on the Hugging Face hub, or `demo` for the included model.
Flags may also stand in a YAML file (--config FILE) or in the environment (BLOCKYARD_MAX_NUM_SEQS=64)."""

COMMANDS = (
    "serve",
    "run-batch",
    "bench",
    "simulate",
    "tune",
    "quantize",
    "run",
    "ring",
    "keys",
    "flags",
    "parsers",
    "models",
    "api",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    return pipes.exit_code_of(lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    command = words.pop(0) if words else "help"
    if command in ("version", "--version", "-V"):
        print(f"blockyard {blockyard.__version__}")
        return 0
    if command in ("help", "--help", "-h"):
        print(USAGE)
        return 0
    try:
        return _run(command, words)
    except BlockyardError as e:
        for line in str(e).splitlines():
            print(f"blockyard {command}: error: {line}", file=sys.stderr)
        return e.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _run(command: str, words: list[str]) -> int:
    if command not in COMMANDS:
        close = difflib.get_close_matches(command, COMMANDS, n=1)
        raise ConfigError(
            "no such command" + (f"; did you mean {close[0]}?" if close else f"; try {', '.join(COMMANDS)}")
        )
    if {"-h", "--help"} & {*words} and command in ("serve", "tune", "run", "ring"):
        print(USAGE, documents.help_text(), sep="\n\n")
        return 0
    return _main_of(command)(words)


def _main_of(command: str) -> Callable[[Sequence[str]], int]:
    match command:
        case "serve":
            return serve.main
        case "run":
            return multi_host.run
        case "ring":
            return multi_host.ring
        case "keys":
            return multi_host.keys
        case "flags":
            return flags
        case "parsers":
            return parser_documents.TABLES.command
        case "models":
            return model_documents.TABLES.command
        case _:
            return _client_command(command)


def _client_command(command: str) -> Callable[[Sequence[str]], int]:
    # it loads the offline engine and the load generators: 0.1 s that `serve` does not wait for
    from blockyard.services.cli import client_commands  # noqa: PLC0415

    return client_commands.MAINS[command]


def flags(args: Sequence[str]) -> int:
    """Prints every flag; `--markdown` prints a table, `--write FILE` updates the table in a document. --quantization
    prints the names of that flag, and may be followed by `--write FILE`. Raises ConfigError.
    """
    match list(args):
        case []:
            print(documents.help_text(show_refused=True))
        case ["--markdown"]:
            print(documents.markdown(), documents.markdown(vllm_only.GROUPS), sep="\n\n")
        case ["--write", name]:
            documents.rewrite(Path(name), documents.with_table)
        case ["--quantization", *others]:
            quantization_documents.TABLES.command(others)
        case _:
            raise ConfigError("expected nothing, --markdown, --quantization, or --write FILE")
    return 0

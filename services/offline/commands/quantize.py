"""`blockyard quantize MODEL OUT --to FORM`: writes a quantized checkpoint of a 16-bit one, and what it costs.

Weights are rounded to nearest by `gpu_worker.quantize` in a process of its own, which loads torch. With a text both
models score it: the error of weights says little about that of answers.
"""

import argparse
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import msgspec

from blockyard.services.launcher.models import model_files
from blockyard.services.offline.llm import LLM
from blockyard.services.offline.sampling_params import SamplingParams
from blockyard.shared.config import parsed_flags
from blockyard.shared.config.parsed_flags import Values
from blockyard.shared.errors import ConfigError
from blockyard.shared.quantization.reading import check_names
from blockyard.shared.quantization.table import QUANTIZED_TO, W4

GROUP = 128
WINDOW = 1024  # tokens that are scored together


class QuantizeParser(argparse.ArgumentParser):
    """Raises ConfigError for wrong flags instead of exiting."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def parser() -> QuantizeParser:
    text = (
        "Writes a checkpoint in the layout of compressed-tensors: linear layers rounded to nearest, without the head."
    )
    made = QuantizeParser("blockyard quantize", description=text)
    add = made.add_argument
    add("model", metavar="MODEL", help="a folder, a name on the Hugging Face hub, or demo")
    add("out", metavar="OUT", type=Path, help="the folder to write, which is new or empty")
    add(
        "--to",
        required=True,
        choices=QUANTIZED_TO,
        help="fp8 and int8 have scales of rows, and inputs are rounded, too",
    )
    add("--group", type=int, metavar="N", help=f"inputs of a scale, for w4 ({GROUP})")
    add("--asymmetric", action="store_true", help="w4 with zeros")
    add("--ignore", nargs="+", default=[], metavar="NAME", help="matrices that stay: names, globs, re:EXPRESSION")
    add("--text", type=Path, metavar="FILE", help="print the bits per byte of this text before and after")
    return made


def main(args: Sequence[str]) -> int:
    """Raises ConfigError for wrong flags, and BlockyardError."""
    given = parser().parse_args(args)
    if given.to != W4 and (given.group is not None or given.asymmetric):
        raise ConfigError(f"--{'asymmetric' if given.asymmetric else 'group'} is for --to {W4}")
    if given.group is not None and given.group < 1:
        raise ConfigError(f"--group {given.group}: groups have at least 1")
    try:
        check_names(**{"--ignore": given.ignore})
    except ValueError as e:
        raise ConfigError(str(e)) from e
    text = None if given.text is None else _read(given.text)
    model = model_files.find(Values(parsed_flags.from_command_line(["--model", given.model])[0]))
    source = model.path
    if model.modules_path is not None:
        raise ConfigError(f"{source}: the modules.json of this model is in the folder around it: that is not built yet")
    how = {"to": given.to, "group": given.group or GROUP, "asymmetric": given.asymmetric, "ignore": given.ignore}
    words = [str(source), str(given.out), msgspec.json.encode(how).decode()]
    command = [sys.executable, "-P", "-m", "blockyard.services.gpu_worker.quantize", *words]
    code = subprocess.run(command, check=False).returncode
    if code:
        return code
    if text is not None:
        before, after = (bits_per_byte(folder, text) for folder in (source, given.out))
        print(f"bits per byte: {before:.4f} before, {after:.4f} after ({after / before - 1:+.2%})", flush=True)
    return 0


def bits_per_byte(folder: Path, text: str) -> float:
    """Of a text, without its first token. Each window of tokens begins with the last token of the one before it."""
    with LLM(folder, log_level="warning") as llm:
        ids = llm.get_tokenizer().encode(text)
        windows = [ids[start : start + WINDOW + 1] for start in range(0, len(ids) - 1, WINDOW)]
        if not windows:
            raise ConfigError(f"--text: {len(ids)} token; at least 2 are needed")
        prompts = [{"prompt_token_ids": window} for window in windows]
        outputs = llm.generate(
            prompts, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0), use_tqdm=False
        )
    nats = 0.0
    for window, output in zip(windows, outputs, strict=True):
        assert output.prompt_logprobs is not None
        for token, found in zip(window[1:], output.prompt_logprobs[1:], strict=True):
            assert found is not None
            nats -= found[token].logprob
    return nats / math.log(2) / len(text.encode())


def _read(file: Path) -> str:
    try:
        text = file.read_text("utf-8")
    except (OSError, ValueError) as e:
        raise ConfigError(f"--text {file}: {e.strerror if isinstance(e, OSError) else 'is not UTF-8'}") from e
    if not text.strip():
        raise ConfigError(f"--text {file}: the file is empty")
    return text

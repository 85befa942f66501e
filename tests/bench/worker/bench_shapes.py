"""Runs each model shape of `blockyard bench suite` with random bfloat16 weights through `LLM`; one line each.

`bench_shapes.py [--only NAME ...]` needs a GPU; models that do not fit have fewer layers. `--tiny` cuts each shape to
two narrow layers, for the CPU. Each shape runs in a process of its own, with a time limit.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from blockyard import LLM, SamplingParams
from blockyard.services.bench.suite import shapes
from blockyard.services.bench.suite.served import random_requests
from blockyard.shared.architectures import find_architecture
from blockyard.shared.config.text_part import text_part

PROMPT_LENS, OUTPUT_LEN = (300, 5), 16
END_S = 5.0
LAYERS = {"deepseek-v3": 5, "gpt-oss-120b": 18, "llama-3.3-70b": 40}  # of 140 GB
LAYERS_OF_80_GB = {"gpt-oss-120b": 9, "llama-3.3-70b": 20, "mixtral-8x7b": 16}
TINY = {
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "ffn_dim": 256,
    "word_embed_proj_dim": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 64,
}
_WEIGHTS = re.compile(r"weights: ([\d.]+) GB")


class ShapeRun(msgspec.Struct, frozen=True):
    """What the process of a shape prints last."""

    start_s: float
    token_ids: list[list[int]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=shapes.SHAPES, default=shapes.SHAPES, metavar="NAME")
    parser.add_argument("--tiny", action="store_true", help="two narrow layers, for the CPU")
    parser.add_argument("--limit-s", type=float, default=120.0, help="of a shape (%(default)s)")
    parser.add_argument("--graphs", action="store_true", help="with CUDA graphs")
    parser.add_argument("--flags", default="{}", help="more keywords of LLM, a JSON object")
    parser.add_argument("--run", help=argparse.SUPPRESS)  # the folder and overrides of a process of one shape
    options = parser.parse_args()
    more = json.loads(options.flags) | ({} if options.graphs else {"enforce_eager": True})
    if options.run:
        run(options.run, more)
        return 0
    layers = {} if options.tiny else LAYERS | (LAYERS_OF_80_GB if gpu_gb() < 100 else {})
    failed = 0
    print(f"{'shape':<21} {'layers':>6} {'weights GB':>10} {'start s':>8} {'tokens':>7}  result", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in options.only:
            failed += not measure(name, Path(folder), overrides(name, options.tiny, layers.get(name)), options)
    return 1 if failed else 0


def gpu_gb() -> float:
    """Memory of the first GPU."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]) / 1000


def overrides(name: str, tiny: bool, num_layers: int | None) -> dict[str, Any]:
    """Returns what is laid over config.json."""
    config = text_part(shapes.read(name))
    if not tiny:
        return {} if num_layers is None else {"num_hidden_layers": num_layers}
    heads = {} if "head_dim" in config or "qk_nope_head_dim" not in config else {"num_key_value_heads": 4}
    return {key: value for key, value in (TINY | heads).items() if config.get(key) is not None}


def measure(name: str, folder: Path, patch: dict[str, Any], options: argparse.Namespace) -> bool:
    """Prints the line of a shape; returns whether it ran."""
    num_layers = patch.get("num_hidden_layers") or text_part(shapes.read(name))["num_hidden_layers"]
    named = shapes.architectures(name)
    if find_architecture(named) is None:
        print(f"{name:<21} {num_layers:>6} {'':>27}  skipped: no architecture {', '.join(named)} here", flush=True)
        return True
    argument = json.dumps([str(shapes.write(name, folder)), patch])
    command = [sys.executable, "-P", __file__, "--run", argument, "--flags", options.flags]
    command += ["--graphs"] if options.graphs else []
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, text=True)
        try:
            code = process.wait(options.limit_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
            time.sleep(END_S)  # the ring ends with its parent, and frees the GPU's memory
            result = f"no result within {options.limit_s:g} s"
        else:
            result = "" if code == 0 else f"exit code {code}"
        out.seek(0)
        lines = out.read().splitlines()
    weights = next((found[1] for line in lines if (found := _WEIGHTS.search(line))), "")
    if result:
        print(f"{name:<21} {num_layers:>6} {weights:>10} {'':>16}  {result}: {last_error(lines)}", flush=True)
        return False
    ran = msgspec.json.decode(lines[-1], type=ShapeRun)
    tokens = sum(map(len, ran.token_ids))
    different = len({*ran.token_ids[0], *ran.token_ids[-1]})
    print(
        f"{name:<21} {num_layers:>6} {weights:>10} {ran.start_s:>8.1f} {tokens:>7}  ok, {different} different",
        flush=True,
    )
    return True


def last_error(lines: list[str]) -> str:
    """Returns the line that most likely says what went wrong."""
    errors = [line.strip() for line in lines if "Error" in line or "error" in line]
    return (errors or lines or ["no output"])[-1][:300]


def run(argument: str, more: dict[str, Any]) -> None:
    """Runs one shape in this process."""
    folder, patch = json.loads(argument)
    begin = time.perf_counter()
    with LLM(folder, load_format="dummy", hf_overrides=patch, max_model_len=1024, log_level="info", **more) as llm:
        start_s = time.perf_counter() - begin
        prompts = [random_requests(1, num, OUTPUT_LEN, seed=num)[0].prompt for num in PROMPT_LENS]
        params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_LEN, ignore_eos=True)
        outputs = llm.generate(prompts, params, use_tqdm=False)
    token_ids = [list(output.outputs[0].token_ids) for output in outputs]
    if [len(ids) for ids in token_ids] != [OUTPUT_LEN] * len(PROMPT_LENS):
        raise SystemExit(f"Error: {[len(ids) for ids in token_ids]} tokens instead of {OUTPUT_LEN} each")
    print(msgspec.json.encode(ShapeRun(start_s, token_ids)).decode(), flush=True)


if __name__ == "__main__":
    sys.exit(main())

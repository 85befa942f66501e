"""Time from the launch of `blockyard serve` to the first token, with the start's log lines: twice a model folder.

`bench_startup.py [--checkpoint] FOLDER ...`: a folder needs config.json alone, weights are random and the tokenizer is
the demo's. `--checkpoint` writes them to files first, so that reading them is part of the start.
"""

import contextlib
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch
from rig import ROOT, completion
from safetensors.torch import save_file

from blockyard.services.gpu_worker.loading.hf_config import read_config
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.registry import find_family

PORT = 8123
FLAGS = ("--tokenizer", str(ROOT / "shared/demo_model"), "--max-model-len", "8192", "--port", str(PORT))
SHARD_BYTES = 4 << 30


def write_checkpoint(folder: Path, target: Path) -> None:
    """bfloat16 shards with an index, under the names that checkpoints use."""
    settings = read_config(folder, {})
    (target / "config.json").write_bytes((folder / "config.json").read_bytes())
    table = find_family(settings)(settings, WeightTable(torch.bfloat16, torch.device("meta"))).table
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, place in table.places.items():
        value = torch.randn(place.shape, dtype=torch.bfloat16, device="cuda").mul_(0.02).cpu()
        if size + value.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = value
        size += value.nbytes
    index = {}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        save_file(shard, target / file)
        index |= dict.fromkeys(shard, file)
    (target / "model.safetensors.index.json").write_bytes(msgspec.json.encode({"weight_map": index}))


def first_token_s(launched: float) -> float:
    body = msgspec.json.encode(completion(1, prompt=[11, 12, 13]))
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}/v1/completions", body)
    request.add_header("Content-Type", "application/json")
    ready = False
    while not ready:
        time.sleep(0.01)
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            ready = urllib.request.urlopen(f"http://127.0.0.1:{PORT}/ready", timeout=5).status == 200
    urllib.request.urlopen(request, timeout=120).read()
    return time.perf_counter() - launched


def start(model: str, *flags: str) -> None:
    command = [sys.executable, "-m", "blockyard", "serve", model, *FLAGS, *flags]
    launched = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None

        def show(lines: Iterator[str]) -> None:
            for line in lines:
                print(f"  {time.perf_counter() - launched:6.2f} {line.rstrip()}", flush=True)

        reader = threading.Thread(target=show, args=(process.stdout,))
        reader.start()
        print(f"{model}: first token after {first_token_s(launched):.2f} s", flush=True)
        process.terminate()
        reader.join()


def main() -> None:
    names = [a for a in sys.argv[1:] if not a.startswith("--")]
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            model, flags = name, ("--load-format", "dummy")
            if "--checkpoint" in sys.argv:
                write_checkpoint(Path(name), Path(folder))
                model, flags = folder, ("--served-model-name", Path(name).name)
            for _ in range(2):
                start(model, *flags)


if __name__ == "__main__":
    main()

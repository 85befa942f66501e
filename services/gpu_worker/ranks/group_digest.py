"""What ranks of a group on several hosts must have in common: compared before anything is loaded."""

import hashlib
from importlib import metadata
from pathlib import Path

import msgspec

import blockyard
from blockyard.services.gpu_worker.parallel.commands import GroupDigest
from blockyard.shared.config.services.worker import DUMMY_FORMATS, WorkerConfig

# settings of a host, or that change no step
OF_HOST = {"process", "model_path", "tokenizer_path", "config_path", "modules_path", "kernel_cache", "kv_scales_path"}
OF_HOST |= {"gpu", "node_rank", "replica", "replicas", "threads", "rank_timeout_s"}
OF_HOST |= {"load_strategy", "prefetch_threads", "prefetch_block_bytes"}
SOURCES = ("services/gpu_worker", "services/kv_transfer", "shared", "kernels")
WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
NUM_SAMPLES, SAMPLE_BYTES = 16, 4096  # of a file of weights: reading all of them takes minutes
CHARS = 12  # of a hash in an error


def make_digest(config: WorkerConfig) -> GroupDigest:
    settings = msgspec.to_builtins(config)
    for name in OF_HOST:
        settings.pop(name)
    return GroupDigest(build(), weights(config), msgspec.json.encode(settings, order="sorted"))


def build() -> str:
    """Returns the versions of Blockyard and torch, with a hash of the source that ranks run."""
    found, top = hashlib.sha256(), Path(blockyard.__file__).parent
    for folder in SOURCES:
        root = (top / folder).resolve()
        for path in sorted(root.rglob("*.py")):
            found.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return f"{blockyard.__version__} ({found.hexdigest()[:CHARS]}), torch {metadata.version('torch')}"


def weights(config: WorkerConfig) -> str:
    """Returns the number and size of the files, with a hash of config.json and of samples of each file."""
    folder = Path(config.model_path)
    found, num, size_bytes = hashlib.sha256(), 0, 0
    settings = Path(config.config_path or folder) / "config.json"
    if settings.is_file():
        found.update(settings.read_bytes())
    is_dummy = config.load_format in DUMMY_FORMATS
    for path in [] if is_dummy else sorted(one for one in folder.iterdir() if one.suffix in WEIGHTS):
        num, size = num + 1, path.stat().st_size
        size_bytes += size
        found.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for i in range(NUM_SAMPLES):
                file.seek(max(size - SAMPLE_BYTES, 0) * i // (NUM_SAMPLES - 1))
                found.update(file.read(SAMPLE_BYTES))
    return f"{num} files, {size_bytes} bytes ({found.hexdigest()[:CHARS]})"


def differences(theirs: GroupDigest, ours: GroupDigest) -> str:
    """Returns in words what a rank has other than the leader; empty: nothing."""
    if theirs.build != ours.build:
        return f"another build than the leader: {theirs.build}, the leader's {ours.build}"
    if theirs.flags != ours.flags:
        mine, other = (msgspec.json.decode(one.flags) for one in (theirs, ours))
        names = sorted(name for name in {*mine, *other} if mine.get(name) != other.get(name))
        return "other flags than the leader: " + ", ".join(
            f"{name} {mine.get(name)}, the leader's {other.get(name)}" for name in names
        )
    if theirs.weights != ours.weights:
        return f"other weights than the leader: {theirs.weights}, the leader's {ours.weights}"
    return ""

"""How the GPUs of a host are used, as a name and as flags of `blockyard serve`."""

import math
import re
from dataclasses import dataclass
from pathlib import Path

from blockyard.services.bench.prefill_decode.deployments import APART_FLAGS
from blockyard.shared.errors import ConfigError

_PART = re.compile("(tp|pp|dp|ep)([1-9][0-9]*)")
_FLAGS = {"tp": "--tensor-parallel-size", "pp": "--pipeline-parallel-size", "dp": "--data-parallel-size"}
SPREAD = "--enable-expert-parallel"
APART = "apart-"  # a prefill and a decode worker, each of the layout that follows
GPU = Path("/dev/nvidiactl")  # exists if the machine has a GPU


@dataclass(frozen=True, slots=True)
class Layout:
    """`flags` of `blockyard serve`, for `num_gpus` GPUs."""

    name: str
    flags: tuple[str, ...]
    num_gpus: int
    num_batches: int = 1  # that decoding sequences are dealt out to: of replicas and stages

    @property
    def moves_experts(self) -> bool:
        """Whether --enable-eplb can be added."""
        return SPREAD in self.flags

    @property
    def is_apart(self) -> bool:
        return self.name.startswith(APART)


ONE = Layout("one", (), 1)
PEER = Layout("peer", (), 2)  # another server, compared with PEER_OF
PEER_OF = "tp2"


def has_gpu() -> bool:
    return GPU.exists()


def read_layout(name: str) -> Layout:
    """`one`; `tp2`, `pp2`, `dp2` and their products, as `tp2pp2`. `ep2`: experts on 2 ranks, which share the attention;
    with dp, on the ranks that dp and tp give. `apart-tp2`: a prefill and a decode worker of tp2. Raises ConfigError."""
    if name == ONE.name:
        return ONE
    shape = name.removeprefix(APART)
    parts = [(kind, int(size)) for kind, size in _PART.findall(shape)]
    sizes = dict(parts)
    if "".join(f"{kind}{size}" for kind, size in parts) != shape or not parts or len(sizes) < len(parts):
        raise ConfigError(f"--layouts {name}: expected tp2, pp2, ep2, dp2ep2 or other products of these")
    experts = sizes.pop("ep", None)
    if experts is not None and not {"tp", "dp"} & sizes.keys():
        sizes["tp"] = experts
    if experts is not None and experts != sizes.get("tp", 1) * sizes.get("dp", 1):
        raise ConfigError(f"--layouts {name}: experts are on as many ranks as tp and dp give")
    flags = [word for kind, size in sizes.items() for word in (_FLAGS[kind], str(size))]
    flags += [SPREAD] if experts is not None else []
    num_gpus, num_batches = math.prod(sizes.values()), sizes.get("dp", 1) * sizes.get("pp", 1)
    if shape == name:
        return Layout(name, tuple(flags), num_gpus, num_batches)
    if "dp" in sizes:
        raise ConfigError(f"--layouts {name}: there is one prefill and one decode worker, without replicas")
    return Layout(name, (*APART_FLAGS, *flags), 2 * num_gpus, num_batches)

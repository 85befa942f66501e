"""How the GPUs of a host are used, as a name and as flags of `blockyard serve`."""

import math
import re
from dataclasses import dataclass
from pathlib import Path

from blockyard.shared.errors import ConfigError

_PART = re.compile("(tp|pp|dp|ep)([1-9][0-9]*)")
_FLAGS = {"tp": "--tensor-parallel-size", "pp": "--pipeline-parallel-size", "dp": "--data-parallel-size"}
SPREAD = "--enable-expert-parallel"
GPU = Path("/dev/nvidiactl")  # exists if the machine has a GPU


@dataclass(frozen=True, slots=True)
class Layout:
    """`flags` of `blockyard serve`, for `num_gpus` GPUs."""

    name: str
    flags: tuple[str, ...]
    num_gpus: int

    @property
    def moves_experts(self) -> bool:
        """Whether --enable-eplb can be added."""
        return SPREAD in self.flags and _FLAGS["dp"] not in self.flags


ONE = Layout("one", (), 1)


def has_gpu() -> bool:
    return GPU.exists()


def read_layout(name: str) -> Layout:
    """`tp2`, `pp2`, `dp2` and their products, as `tp2pp2`. `ep2`: experts on 2 ranks, which share the attention; with
    dp, on the ranks that dp and tp give. Raises ConfigError."""
    parts = [(kind, int(size)) for kind, size in _PART.findall(name)]
    sizes = dict(parts)
    if "".join(f"{kind}{size}" for kind, size in parts) != name or not parts or len(sizes) < len(parts):
        raise ConfigError(f"--layouts {name}: expected tp2, pp2, ep2, dp2ep2 or other products of these")
    experts = sizes.pop("ep", None)
    if experts is not None and not {"tp", "dp"} & sizes.keys():
        sizes["tp"] = experts
    if experts is not None and experts != sizes.get("tp", 1) * sizes.get("dp", 1):
        raise ConfigError(f"--layouts {name}: experts are on as many ranks as tp and dp give")
    flags = [word for kind, size in sizes.items() for word in (_FLAGS[kind], str(size))]
    return Layout(name, (*flags, *([SPREAD] if experts is not None else [])), math.prod(sizes.values()))

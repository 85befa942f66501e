import pytest

from blockyard.services.bench.parallel.layouts import read_layout
from blockyard.shared.errors import ConfigError

TP, PP, DP, EP = (
    "--tensor-parallel-size",
    "--pipeline-parallel-size",
    "--data-parallel-size",
    "--enable-expert-parallel",
)


@pytest.mark.parametrize(
    ("name", "flags", "num_gpus"),
    [
        ("tp2", (TP, "2"), 2),
        ("pp2", (PP, "2"), 2),
        ("tp2pp2", (TP, "2", PP, "2"), 4),
        ("ep2", (TP, "2", EP), 2),
        ("dp2", (DP, "2"), 2),
        ("dp2ep2", (DP, "2", EP), 2),
        ("dp2tp2ep4", (DP, "2", TP, "2", EP), 4),
    ],
)
def test_names_are_flags(name: str, flags: tuple[str, ...], num_gpus: int) -> None:
    found = read_layout(name)
    assert (found.flags, found.num_gpus) == (flags, num_gpus)


@pytest.mark.parametrize("name", ["", "tp", "tp0", "tp2x", "tp2tp3", "2tp", "dp2ep3", "tp2 pp2"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^--layouts {name}: "):
        read_layout(name)

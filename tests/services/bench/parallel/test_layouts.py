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
        ("apart-tp2", ("--prefill-workers", "1", "--decode-workers", "1", TP, "2"), 4),
        ("one", (), 1),
    ],
)
def test_names_are_flags(name: str, flags: tuple[str, ...], num_gpus: int) -> None:
    found = read_layout(name)
    assert (found.flags, found.num_gpus) == (flags, num_gpus)


@pytest.mark.parametrize(("name", "num"), [("tp2", 1), ("tp2pp2", 2), ("dp2ep2", 2), ("apart-pp2", 2)])
def test_replicas_and_stages_have_batches_of_their_own(name: str, num: int) -> None:
    assert read_layout(name).num_batches == num


@pytest.mark.parametrize("name", ["", "tp", "tp0", "tp2x", "tp2tp3", "2tp", "dp2ep3", "tp2 pp2", "apart-", "apart-dp2"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^--layouts {name}: "):
        read_layout(name)

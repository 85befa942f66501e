"""Workers that cannot exchange KV blocks are named once, with what differs."""

import pytest

from blockyard.services.scheduler.workers.workers import LayoutCheck
from blockyard.shared.messages import Geometry, KVRole

P, D, BOTH = KVRole.PREFILL, KVRole.DECODE, KVRole.BOTH
LAYOUT = "layers 32; KV heads 8; KV dtype 'bfloat16'; checksums on"


def geometry(role: KVRole, layout: str = LAYOUT, block_size: int = 16) -> Geometry:
    return Geometry(100, block_size, 4096, 1000, [1], 8, 512, kv_role=role, kv_layout=layout)


def warnings(caplog: pytest.LogCaptureFixture, *attached: Geometry) -> list[str]:
    check = LayoutCheck()
    workers = dict(enumerate(attached, 0xA))
    for worker, one in workers.items():
        check.on_attached(worker, one, [(w, g) for w, g in workers.items() if w <= worker])
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    "attached",
    [
        (geometry(P), geometry(D)),
        (geometry(P), geometry(D), geometry(BOTH), geometry(D)),
        (geometry(BOTH, ""), geometry(BOTH, "")),
        (geometry(D), geometry(D, LAYOUT.replace("32", "28"))),
    ],
)
def test_workers_that_fit_and_workers_of_one_role(caplog: pytest.LogCaptureFixture, attached: tuple[Geometry]) -> None:
    assert warnings(caplog, *attached) == []


@pytest.mark.parametrize(
    ("one", "other", "reason"),
    [
        (geometry(P), geometry(D, LAYOUT.replace("32", "28")), "layers 28 and layers 32"),
        (
            geometry(P),
            geometry(D, LAYOUT.replace("8;", "4;").replace("on", "off")),
            "KV heads 4 and KV heads 8; checksums off and checksums on",
        ),
        (geometry(P), geometry(D, block_size=32), "block size 32 and 16"),
        (geometry(P), geometry(D, ""), "b has no KV transfers; start it with --role"),
        (geometry(P, ""), geometry(D), "a has no KV transfers; start it with --role"),
    ],
)
def test_what_differs_is_said_once(
    caplog: pytest.LogCaptureFixture, one: Geometry, other: Geometry, reason: str
) -> None:
    said = warnings(caplog, one, other, one, other)
    assert said == [f"workers b (decode) and a (prefill) exchange no KV blocks: {reason}"]


def test_a_lost_worker_is_in_no_warning_and_is_compared_when_it_is_back(caplog: pytest.LogCaptureFixture) -> None:
    check, both, prefill = LayoutCheck(), geometry(BOTH, ""), geometry(P)
    check.on_attached(0xA, both, [(0xA, both)])
    check.on_attached(0xB, prefill, [(0xB, prefill)])  # the first worker is lost
    assert caplog.records == []
    check.on_attached(0xC, both, [(0xB, prefill), (0xC, both)])
    assert [record.args[:4] for record in caplog.records if isinstance(record.args, tuple)] == [(0xC, BOTH, 0xB, P)]

"""The start-up report: lines and bars for membership changes."""

import io

from msgspec.structs import replace
from rich.console import Console
from rings import Recorder

from blockyard.services.launcher.supervision.start_up import PlainDisplay, StartupProgressBars, StartupTracker
from blockyard.shared.messages import Member, Role

WORKER = Member("gpu_worker", Role.GPU_WORKER, 1, "ipc:///w")
SCHEDULER = Member("scheduler", Role.SCHEDULER, 2, "ipc:///s")


def test_complete_when_all_are_ready_and_not_before() -> None:
    display = Recorder()
    start = StartupTracker(["message_bus", "gpu_worker", "scheduler"], display)
    assert not start.on_member(replace(WORKER, ready=True))
    assert not start.on_member(SCHEDULER)
    assert display.were_ready == ["message_bus", "gpu_worker"]
    assert start.on_member(replace(SCHEDULER, ready=True))
    assert start.complete
    assert not start.on_member(replace(SCHEDULER, ready=True, model="m"))  # once


def test_phases_progress_and_notes_are_told_once() -> None:
    display = Recorder()
    start = StartupTracker(["gpu_worker"], display)
    loading = replace(WORKER, phase="loading weights", progress=0.5)
    for member in (WORKER, loading, loading, replace(loading, notes=["a"]), replace(loading, notes=["a", "b"])):
        start.on_member(member)
    assert display.phases == [("gpu_worker", "loading weights", 0.5)]
    assert display.said == ["  gpu_worker: a", "  gpu_worker: b"]


def test_members_that_are_not_our_children_are_ignored() -> None:
    display = Recorder()
    start = StartupTracker(["scheduler"], display)
    assert not start.on_member(replace(WORKER, ready=True))
    assert display.were_ready == []


def test_a_child_lost_during_the_start_has_to_be_ready_anew() -> None:
    start = StartupTracker(["gpu_worker", "scheduler"], Recorder())
    start.on_member(replace(WORKER, ready=True))
    start.on_gone(WORKER)
    assert not start.on_member(replace(SCHEDULER, ready=True))
    assert start.on_member(replace(WORKER, incarnation=7, ready=True))


def test_news_of_a_dead_incarnation_does_not_change_the_new_one() -> None:
    display = Recorder()
    start = StartupTracker(["gpu_worker"], display)
    start.on_member(replace(WORKER, ready=True))
    start.on_member(replace(WORKER, incarnation=7, ready=True))
    start.on_gone(WORKER)  # the registry noticed late
    start.on_member(replace(WORKER, incarnation=7, ready=True))
    assert display.said == ["gpu_worker is ready again"]


def test_plain_lines() -> None:
    out = io.StringIO()
    ticks = iter([0.0, 1.0, 1.5])
    start = StartupTracker(["message_bus", "gpu_worker"], PlainDisplay(out), clock=lambda: next(ticks))
    for progress in (0.1, 0.9):
        start.on_member(replace(WORKER, phase="loading weights", progress=progress))
    start.on_member(replace(WORKER, phase="ready"))
    start.on_member(replace(WORKER, phase="ready", ready=True, notes=["weights: 1 GB in 2 s (0.5 GB/s)"]))
    assert out.getvalue().splitlines() == [
        "message_bus: ready after 1.0 s",
        "gpu_worker: loading weights",
        "  gpu_worker: weights: 1 GB in 2 s (0.5 GB/s)",
        "gpu_worker: ready after 1.5 s",
    ]


def test_bars_on_a_terminal() -> None:
    out = io.StringIO()
    bars = StartupProgressBars(["message_bus", "gpu_worker"], out, Console(file=out, force_terminal=True, width=100))
    start = StartupTracker(["message_bus", "gpu_worker"], bars)
    start.on_member(replace(WORKER, phase="loading [weights]", progress=0.5, notes=["KV: 10 blocks [x]"]))
    start.on_member(replace(WORKER, ready=True))
    bars.close()
    shown = out.getvalue()
    assert "gpu_worker: KV: 10 blocks [x]" in shown
    assert "ready after" in shown
    bars.say("below")
    assert out.getvalue().rstrip().endswith("below")

"""What `serve` shows while it starts."""

import io
from pathlib import Path

import pytest

from blockyard.services.launcher.serve import make_display
from blockyard.services.launcher.supervision.start_up import PlainDisplay, StartupProgressBars

from .test_ports import deployment


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("out", "shows_bars", "kind"),
    [
        (Terminal(), True, StartupProgressBars),
        (Terminal(), False, PlainDisplay),
        (io.StringIO(), True, PlainDisplay),
    ],
)
def test_bars_are_for_terminals_that_want_them(tmp_path: Path, out: io.StringIO, shows_bars: bool, kind: type) -> None:
    display = make_display(deployment(tmp_path), out, shows_bars)
    try:
        assert type(display) is kind
    finally:
        display.close()

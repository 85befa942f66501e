"""Progress bars on a terminal, drawn by rich."""

from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


def make_progress(
    out: "TextIO | Console",
    last: str,
    *,
    first: str = "{task.description}",
    bar_width: int,
    counts: bool = True,
    spins: bool = False,
    refreshes_per_s: float | None = 10,
) -> "Progress":
    """Returns bars that are not started yet, one for each task that is added.

    first, last: rich's templates of the text at both ends of a line. counts: shows how much is done of how much. spins:
    a spinner turns until a task is complete. refreshes_per_s: None: a bar is drawn by `Progress.refresh` alone.
    """
    # rich takes 0.04 s to import, which only what draws on a terminal needs
    from rich import console, progress  # noqa: PLC0415

    return progress.Progress(
        *([progress.SpinnerColumn(finished_text="[green]✓")] if spins else []),
        progress.TextColumn(first),
        progress.BarColumn(bar_width=bar_width),
        *([progress.MofNCompleteColumn()] if counts else []),
        progress.TimeElapsedColumn(),
        progress.TextColumn(last),
        console=out if isinstance(out, console.Console) else console.Console(file=out),
        auto_refresh=refreshes_per_s is not None,
        refresh_per_second=refreshes_per_s or 1,
    )

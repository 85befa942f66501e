"""Draws training_log.jsonl as loss.svg. Needs matplotlib, which comes with the test extras.

The log of several runs in a row is their logs one after the other: the tokens seen are counted through.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import matplotlib as mpl
import msgspec
from matplotlib.figure import Figure

from demo_training.train import LogEntry


def epochs_through(log: list[LogEntry]) -> Iterator[float]:
    """Epochs since the first run began; a run starts where the step falls."""
    done, last = 0.0, log[0]
    for entry in log:
        if entry.step < last.step:
            done += last.epoch
        yield done + entry.epoch
        last = entry


def draw(log: list[LogEntry]) -> Figure:
    epochs = list(epochs_through(log))
    figure = Figure(figsize=(7.2, 4.0), layout="constrained")
    left = figure.add_subplot()
    left.plot(epochs, [entry.train_nats for entry in log], color="#2563eb", label="training (nats per token)")
    left.plot(
        epochs,
        [entry.validation_chat_nats for entry in log],
        color="#16a34a",
        label="validation, chats (nats per token)",
    )
    scores = [(epoch, entry.validation_bits_per_byte) for epoch, entry in zip(epochs, log, strict=True)]
    measured = [(epoch, score) for epoch, score in scores if score is not None]
    left.plot(
        [epoch for epoch, _ in measured],
        [score for _, score in measured],
        color="#dc2626",
        marker=".",
        label="validation, files (bits per byte)",
    )
    for (epoch, entry), following in zip(zip(epochs, log, strict=True), log[1:], strict=False):
        if following.window != entry.window:
            left.axvline(epoch, color="#94a3b8", linewidth=0.8, linestyle="--")
            left.annotate(f" {following.window} tokens", (epoch, 2.6), color="#475569", fontsize=8)
    left.set(xlabel="epochs", ylabel="loss", ylim=(0.5, 3.0))
    left.grid(alpha=0.25)
    left.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path)
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    mpl.rcParams["svg.hashsalt"] = "blockyard"  # the same log gives the same bytes
    log = msgspec.json.Decoder(LogEntry).decode_lines(options.log.read_bytes())
    draw(log).savefig(options.picture, metadata={"Date": None} if options.picture.suffix == ".svg" else None)


if __name__ == "__main__":
    main()

"""Prints the seconds of a copy of a file's bytes to a device, and of `safetensors`' read and copy: DEVICE FILE."""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

ROUNDS = 9


def seconds(device: torch.device, work: Callable[[], object]) -> float:
    times = []
    for _ in range(ROUNDS):
        begin_s = time.perf_counter()
        kept = work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin_s)
        del kept
    return statistics.median(times)


def main(device: torch.device, file: Path) -> None:
    numbers = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)
    there = torch.zeros(len(numbers), dtype=torch.uint8, device=device)
    held = numbers.pin_memory() if device.type == "cuda" else numbers
    copy_s = seconds(device, lambda: there.copy_(held, non_blocking=True))
    read_s = seconds(device, lambda: [one.to(device, copy=True) for one in load_file(file).values()])
    print(copy_s, read_s)


if __name__ == "__main__":
    main(torch.device(sys.argv[1]), Path(sys.argv[2]))

"""`python -m blockyard.services.gpu_worker.quantize SOURCE TARGET JSON`: JSON is a `rounding.Rounding`."""

import sys
from pathlib import Path

import msgspec

from blockyard.services.gpu_worker.quantize.folder import Written, quantize
from blockyard.services.gpu_worker.quantize.rounding import Rounding
from blockyard.shared.errors import BlockyardError
from blockyard.shared.process import pipes


def main(source: str, target: str, how: str) -> int:
    try:
        written = quantize(Path(source), Path(target), msgspec.json.decode(how, type=Rounding))
    except (BlockyardError, OSError) as e:
        print(f"blockyard quantize: error: {e}", file=sys.stderr)
        return 2
    print(table(written))
    return 0


def table(written: Written) -> str:
    """Error and bytes of each layer."""
    lines = [f"{'layer':<24}{'error':>9}{'MB before':>12}{'MB after':>11}"]
    for name, layer in written.layers.items():
        error = f"{layer.relative_error:.2%}" if layer.size else "-"
        sizes = f"{layer.bytes_before / 1e6:>12.2f}{layer.bytes_after / 1e6:>11.2f}"
        lines.append(f"{name or 'others':<24}{error:>9}{sizes}")
    before = sum(layer.bytes_before for layer in written.layers.values())
    after = sum(layer.bytes_after for layer in written.layers.values())
    lines.append(f"{'all':<24}{'':>9}{before / 1e6:>12.2f}{after / 1e6:>11.2f}")
    if written.stacks:
        first, size = next(iter(written.stacks)), sum(written.stacks.values()) / 1e6
        lines.append(
            f"stacked experts that stay as they are: {len(written.stacks)} tensors, {size:.2f} MB ({first} ...)"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(pipes.exit_code_of(lambda: main(*sys.argv[1:])))

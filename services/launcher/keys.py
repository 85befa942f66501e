"""`blockyard keys DIR`: the key pair of a deployment."""

from collections.abc import Sequence
from pathlib import Path

from blockyard.shared import curve
from blockyard.shared.errors import ConfigError


def main(args: Sequence[str]) -> int:
    """Raises ConfigError, also if there are keys already."""
    if len(args) != 1 or args[0].startswith("-"):
        raise ConfigError("expected a folder: blockyard keys DIR")
    folder = Path(args[0])
    try:
        curve.write_keys(folder)
    except OSError as e:
        raise ConfigError(f"{folder}: {e.strerror}") from e
    print(f"wrote {folder / curve.PUBLIC_NAME} and {folder / curve.SECRET_NAME}: every member needs both")
    return 0

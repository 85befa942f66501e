"""The deployment's CurveZMQ key pair, shared by all members: one file each for the public and the secret key."""

import os
from dataclasses import dataclass
from pathlib import Path

import zmq

from blockyard.shared.errors import ConfigError

PUBLIC_NAME = "blockyard.key"
SECRET_NAME = "blockyard.key_secret"
KEY_CHARS = 40  # Z85 text of 32 bytes


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Z85 texts, as libzmq takes them."""

    public: bytes
    secret: bytes


def new_keys() -> KeyPair:
    """Returns a new pair, for links of one start."""
    return KeyPair(*zmq.curve_keypair())


def write_keys(folder: Path) -> KeyPair:
    """Writes a new pair into `folder`. Raises ConfigError if one exists: its members would be locked out."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for name in (PUBLIC_NAME, SECRET_NAME):
        if (folder / name).exists():
            raise ConfigError(f"{folder / name} exists; remove it first if every member is to get new keys")
    pair = new_keys()
    for name, text in ((PUBLIC_NAME, pair.public), (SECRET_NAME, pair.secret)):
        fd = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(text + b"\n")
    return pair


def read_keys(public_file: str, secret_file: str) -> KeyPair:
    """Raises ConfigError naming the file that is missing or malformed."""
    return KeyPair(_read_key(Path(public_file)), _read_key(Path(secret_file)))


def _read_key(path: Path) -> bytes:
    try:
        text = path.read_bytes().strip()
    except OSError as e:
        raise ConfigError(f"cannot read key file {path}: {e.strerror}; `blockyard keys DIR` makes a pair") from e
    if len(text) != KEY_CHARS:
        raise ConfigError(f"key file {path} holds {len(text)} characters, a key has {KEY_CHARS}")
    return text

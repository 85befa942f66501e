"""`python3 host_pip.py FOLDER URL`: this machine's pip settings as one pip.conf for an image build, on stdout.

Indexes and find-links that are local folders become URLs of a file server over FOLDER, which gets a link to each.
"""

import configparser
import os
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

CONFIG_FILES = ("/etc/pip.conf", "~/.pip/pip.conf", "~/.config/pip/pip.conf", "$VIRTUAL_ENV/pip.conf")
PLACES = ("index-url", "extra-index-url", "find-links")
LEFT_OUT = ("cert", "client-cert", "config-file", "cache-dir", "require-virtualenv", "target", "user")
CERTIFICATES = "/run/secrets/ca"


def settings() -> dict[str, str]:
    """pip's settings. Environment variables override files, and later files override earlier ones."""
    found: dict[str, str] = {}
    config = configparser.RawConfigParser()
    config.read(os.path.expanduser(os.path.expandvars(f)) for f in (*CONFIG_FILES, "$PIP_CONFIG_FILE"))
    for section in ("global", "install"):
        if config.has_section(section):
            found |= dict(config.items(section))
    for name, value in os.environ.items():
        if name.startswith("PIP_") and value:
            found[name.removeprefix("PIP_").lower().replace("_", "-")] = value
    return {name: value for name, value in found.items() if name not in LEFT_OUT}


def reachable(kind: str, place: str, folder: Path, url: str) -> str:
    """`place`, or the file server's URL for it if it is a folder of this machine."""
    parts = urlsplit(place)
    path = Path(unquote(parts.path)) if parts.scheme in ("", "file") else Path()
    if not path.is_absolute() or not path.is_dir():
        return place
    link = folder / str(len(list(folder.iterdir())))
    if kind == "find-links":
        link.symlink_to(path)
        return f"{url}/{link.name}/"
    link.symlink_to(path.parent)  # an index's pages may point to files beside it
    return f"{url}/{link.name}/{path.name}/"


def main() -> None:
    folder, url = Path(sys.argv[1]), sys.argv[2]
    print(f"[global]\ncert = {CERTIFICATES}")
    for name, value in settings().items():
        words = [reachable(name, word, folder, url) for word in value.split()] if name in PLACES else [value]
        print(f"{name} = {' '.join(words)}")


if __name__ == "__main__":
    main()

"""Downloads models by their hub names. Without a network, files of earlier downloads are used."""

import fnmatch
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (  # type: ignore[attr-defined] # HTTPError is imported there
    GatedRepoError,
    HFValidationError,
    HTTPError,  # of the HTTP library in use; covers failed connections
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from blockyard.shared.config.services.worker import DUMMY_FORMATS
from blockyard.shared.errors import ConfigError
from blockyard.shared.quantization.table import GGUF

SMALL_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "merges*", "vocab*")
SAFETENSORS = ("*.safetensors",)
REACH_S = 10.0
TORCH = ("*.bin", "*.pt", "*.pth")


def download(
    name: str,
    revision: str | None,
    folder: str | None,
    load_format: str,
    ignore: list[str],
    weights: bool,
    token: str | bool | None = None,
    what: str = "model",
) -> Path:
    """Returns the local folder of a hub model. Raises ConfigError with a one-line reason.

    `token`: True is the stored one, False none, None the hub library's default. `what`: begins each error.
    """
    try:
        info = HfApi(token=token).model_info(name, revision=revision, timeout=REACH_S)
        files = [sibling.rfilename for sibling in info.siblings or ()]
        wanted = [*SMALL_FILES, *(weight_patterns(files, load_format, ignore) if weights else ())]
        found = snapshot_download(
            name, revision=revision, cache_dir=folder, allow_patterns=wanted, ignore_patterns=ignore, token=token
        )
    except GatedRepoError as e:
        raise ConfigError(f"{what} {name}: its owners must grant access; log in to the hub, or give --hf-token") from e
    except RevisionNotFoundError as e:
        raise ConfigError(f"{what} {name}: has no revision {revision}") from e
    except (RepositoryNotFoundError, HFValidationError) as e:
        raise ConfigError(f"{what} {name}: neither a folder here nor a name on the hub") from e
    except (HTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as e:
        return _cached(name, revision, folder, what, e)
    return Path(found)


def weight_patterns(files: list[str], load_format: str, ignore: list[str]) -> tuple[str, ...]:
    """Returns the patterns of weight files to fetch: one format, even if the repository has both."""
    if load_format in DUMMY_FORMATS:
        return ()
    if load_format != "auto":
        return {"safetensors": SAFETENSORS, "pt": TORCH, GGUF: ("*.gguf",)}[load_format]
    kept = [file for file in files if not any(fnmatch.fnmatch(file, pattern) for pattern in ignore)]
    return SAFETENSORS if any(fnmatch.fnmatch(file, SAFETENSORS[0]) for file in kept) else TORCH


def first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _cached(name: str, revision: str | None, folder: str | None, what: str, reason: Exception) -> Path:
    try:
        return Path(snapshot_download(name, revision=revision, cache_dir=folder, local_files_only=True))
    except (LocalEntryNotFoundError, OSError) as e:
        raise ConfigError(
            f"{what} {name}: not on this machine, and the hub cannot be reached ({first_line(reason)}); "
            f"give a local folder{', or `demo` for the shipped model' if what == 'model' else ''}"
        ) from e

"""What a server says of its own settings: its flags without secrets, and the fingerprint of its answers."""

from hashlib import sha256
from importlib import metadata
from typing import Any

import msgspec

from blockyard.shared.config.flags import FLAGS, server
from blockyard.shared.config.parsed_flags import Values
from blockyard.shared.errors import ConfigError

SECRETS = frozenset({"api-key", "admin-key", "hf-token"})
SHOWN_AS = "***"  # a secret that is set
FINGERPRINT_CHARS = 8  # of a hash
OF_SERVER = frozenset(flag.name for flag in server.SERVER)  # flags that change no answer
PARALLEL = {"tp": "tensor-parallel-size", "pp": "pipeline-parallel-size"}


def fields(values: Values) -> dict[str, Any]:
    """Returns fields of a gateway's settings. Raises ConfigError."""
    return {"server_info": msgspec.json.encode(shown_flags(values)).decode(), "system_fingerprint": fingerprint(values)}


def shown_flags(values: Values) -> dict[str, object]:
    """Returns every flag that has an effect, by its name with underscores, as vLLM's settings have it."""
    return {
        name.replace("-", "_"): SHOWN_AS if name in SECRETS and value else value
        for name, value in values.all().items()
        if not FLAGS[name].refused
    }


def fingerprint(values: Values) -> str:
    """Returns the `system_fingerprint` of answers; empty: they have none. Raises ConfigError."""
    mode, given = values.get("fingerprint-mode", str), values.maybe("fingerprint-value", str)
    if (mode == "custom") != bool(given):
        raise ConfigError(
            f"{values.where('fingerprint-value' if given else 'fingerprint-mode')}: --fingerprint-value and "
            "--fingerprint-mode custom belong together"
        )
    if mode == "none":
        return ""
    if given:
        return given
    changing = {name: value for name, value in values.all().items() if name not in SECRETS | OF_SERVER}
    digest = sha256(msgspec.json.encode(changing, order="sorted")).hexdigest()[:FINGERPRINT_CHARS]
    words = ["blockyard", _version()]
    if mode == "full":
        numbers = ((short, values.all()[name]) for short, name in PARALLEL.items())
        words += [f"{short}{number}" for short, number in numbers if isinstance(number, int) and number > 1]
    return "-".join([*words, digest])


def _version() -> str:
    try:
        return metadata.version("blockyard")
    except metadata.PackageNotFoundError:  # run from a checkout
        return "0"

"""Variables that a container platform sets in our name: links to services called `blockyard` or `blockyard-...`.

Kubernetes sets them in every pod of a namespace, Docker for `--link`. None of them is a flag.
"""

import re

_NAME = re.compile(
    r"BLOCKYARD_(\w+_)?"
    r"(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?|ENV_\w+)"
)
_LINK = re.compile(r"(tcp|udp|sctp)://")
_SHOWN = 2  # names in the note


def is_foreign(variable: str, text: str) -> bool:
    """By the name, or, where the name is also a flag's (--port, --metrics-port, --name), by the value."""
    if _NAME.fullmatch(variable):
        return True
    if variable.endswith("_PORT"):
        return _LINK.match(text) is not None
    return variable.endswith("_NAME") and text.startswith("/") and text.count("/") == 2  # "/web/blockyard"


def note(variables: list[str]) -> list[str]:
    """One line for all of them, or none."""
    if not variables:
        return []
    shown = ", ".join(variables[:_SHOWN])
    more = f" and {len(variables) - _SHOWN} more" if len(variables) > _SHOWN else ""
    return [f"{shown}{more}: not read, the container platform set them for a service of that name"]

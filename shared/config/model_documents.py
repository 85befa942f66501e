"""The tables of services/gpu_worker/models/FAMILIES.md: model families and refused architectures."""

from blockyard.shared.architectures import ARCHITECTURES, REFUSED
from blockyard.shared.config.flags.documents import DocumentTables


def markdown() -> str:
    """Returns the tables, one row for each architecture, from `shared/architectures.py`."""
    rows = ["| models | architecture in config.json | file | tasks |", "|---|---|---|---|"]
    rows += [
        f"| {found.models} | `{name}` | `{found.module.replace('.', '/')}.py` | {', '.join(found.tasks)} |"
        for name, found in sorted(ARCHITECTURES.items(), key=lambda item: item[1].module)
    ]
    refused = ["| refused | because |", "|---|---|", *(f"| `{name}` | {why} |" for name, why in REFUSED.items())]
    return "\n".join([*rows, "", *refused])


TABLES = DocumentTables("families", "blockyard models --write services/gpu_worker/models/FAMILIES.md", markdown)

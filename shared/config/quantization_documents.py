"""Documents the names of --quantization: the table in services/gpu_worker/quantization/README.md."""

from blockyard.shared.config.flags.documents import DocumentTables
from blockyard.shared.quantization.table import TABLE, QuantizationName


def markdown() -> str:
    """Returns the table with one row per name."""
    return "\n".join(["| name | what it reads |", "|---|---|", *(f"| `{one.name}` | {_cell(one)} |" for one in TABLE)])


def _cell(one: QuantizationName) -> str:
    if one.refused:
        return f"refused: {one.refused}"
    is_made_at_load = one.of_16_bits == {}  # no file says it
    own = ("its files",) if one.module and not is_made_at_load else ()
    others = (f"files of {', '.join(one.alias_of)}",) if one.alias_of else ()
    at_load = ("16-bit files, quantized while they load",) if one.of_16_bits is not None and one.name != "gguf" else ()
    notes = (one.note,) if one.note else ()
    refused = (f"on a GPU refused: {one.refused_on_gpu}",) if one.refused_on_gpu else ()
    return "; ".join([*own, *others, *at_load, *notes, *refused])


TABLES = DocumentTables(
    "names", "blockyard flags --quantization --write services/gpu_worker/quantization/README.md", markdown
)

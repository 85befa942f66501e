"""The tables of this package's README: routes, and the fields of bodies. `blockyard api --write FILE` writes them."""

from collections.abc import Sequence
from typing import Any, cast

from blockyard.services.api_gateway.apis.interface import Api
from blockyard.services.api_gateway.apis.pooling.interface import PoolingApi
from blockyard.services.api_gateway.apis.pooling.registry import POOLING_APIS
from blockyard.services.api_gateway.apis.registry import APIS
from blockyard.services.api_gateway.endpoints.adapters import AdapterEndpoints
from blockyard.services.api_gateway.endpoints.batches import BatchEndpoints
from blockyard.services.api_gateway.endpoints.documents import Components, summary_of
from blockyard.services.api_gateway.endpoints.files import FileEndpoints
from blockyard.services.api_gateway.endpoints.generation import GenerationEndpoints
from blockyard.services.api_gateway.endpoints.info import InfoEndpoints, TokenizerInfoEndpoints
from blockyard.services.api_gateway.endpoints.operations import OperatorEndpoints
from blockyard.services.api_gateway.endpoints.pooling import PoolingEndpoints
from blockyard.services.api_gateway.endpoints.scale_out import ScaleOutEndpoints
from blockyard.services.api_gateway.endpoints.status import StatusEndpoints
from blockyard.services.api_gateway.endpoints.stored_responses import StoredResponseEndpoints
from blockyard.services.api_gateway.http.access import Access, Route
from blockyard.services.api_gateway.requests.schemas import NOT_BUILT
from blockyard.shared.config.flags.documents import DocumentTables

Columns = Sequence[tuple[Api | PoolingApi, tuple[str, ...]]]  # with the paths that are shown
KEYS = {Access.OPEN: "", Access.KEY: "`--api-key`", Access.OPERATOR: "`--admin-key`"}
ENDPOINTS = (
    GenerationEndpoints,
    ScaleOutEndpoints,
    StoredResponseEndpoints,
    PoolingEndpoints,
    FileEndpoints,
    BatchEndpoints,
    StatusEndpoints,
    InfoEndpoints,
    TokenizerInfoEndpoints,
    OperatorEndpoints,
    AdapterEndpoints,
)


def markdown() -> str:
    rows = ["| route | key | what it does |", "|---|---|---|"]
    rows += [
        f"| `{each.method} {_path(each)}` | {KEYS[each.access]} | {_cell(summary_of(each))} |" for each in _routes()
    ]
    generation = [(api, api.paths) for api in APIS.values()]
    # all paths of an endpoint take the same fields
    pooling = [(api, api.paths[:1]) for api in POOLING_APIS.values()]
    return "\n".join([*rows, "", *_field_table(generation), "", *_field_table(pooling)])


def _field_table(apis: Columns) -> list[str]:
    """Returns the lines of a table with a column for each path."""
    paths = [path for _, shown in apis for path in shown]
    lines = [f"| field | type | {' | '.join(f'`{path}`' for path in paths)} |", f"|---|---|{'---|' * len(paths)}"]
    for name, types in _fields(apis).items():
        marks = " | ".join(_mark(name, api) if path in types else "" for api, shown in apis for path in shown)
        lines.append(f"| `{name}` | {_cell(next(iter(types.values())))} | {marks} |")
    return lines


def _routes() -> list[Route]:
    """All routes. Their handlers belong to no gateway, and are there for their docstrings."""
    return [route for kind in ENDPOINTS for route in kind.routes(cast(Any, kind))]


def _fields(apis: Columns) -> dict[str, dict[str, str]]:
    """The fields of all bodies -> their type, by path."""
    components, found = Components(), dict[str, dict[str, str]]()
    for api, paths in apis:
        components.reference(api.schema)
        for name, schema in components.schemas[api.schema.__name__]["properties"].items():
            found.setdefault(name, {}).update(dict.fromkeys(paths, _type(schema)))
    return dict(sorted(found.items()))


def _type(schema: dict[str, Any]) -> str:
    """The type in words; null is a value of nearly all fields and is left out."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_type(each) for each in schema["anyOf"] if each != {"type": "null"}))
    if "$ref" in schema:
        return "object"
    if "enum" in schema:
        return ", ".join(str(value) for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_type(schema['items'])}"
    return str(schema.get("type", "any"))


def _mark(name: str, api: Api | PoolingApi) -> str:
    return "refused" if name in NOT_BUILT or (isinstance(api, Api) and name in api.refused) else "yes"


def _path(route: Route) -> str:
    return route.path.replace(":.+}", "}")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


TABLES = DocumentTables("routes and fields", "blockyard api --write services/api_gateway/README.md", markdown)

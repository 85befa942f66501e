"""The tables of the README say what the server takes."""

from pathlib import Path

import pytest

from blockyard.services.api_gateway import api_tables
from blockyard.services.api_gateway.http.access import Guard
from blockyard.services.api_gateway.server import build_app
from blockyard.shared.errors import ConfigError

README = Path(__file__).parents[3] / "services/api_gateway/README.md"


def test_the_tables_of_the_readme_are_current() -> None:
    document = README.read_text("utf-8")
    assert api_tables.TABLES.written_in(document) == document, f"run `{api_tables.TABLES.written_by}`"


async def test_every_route_has_a_row_that_says_more_than_its_path(rig) -> None:
    async with rig(serve_docs=False, scale_out=True, tokenizer_info=True) as r:
        app = build_app(r.gateway_config, r.gateway, Guard([], []))
        routes = {
            f"{route.method} {route.resource.canonical}"
            for route in app.router.routes()
            if route.resource and route.method != "HEAD" and not route.resource.canonical.endswith("/")
        }
    methods = ("| `GET", "| `POST", "| `DELETE")
    rows = [line.split("|")[1:4] for line in api_tables.markdown().splitlines() if line.startswith(methods)]
    assert {name.strip(" `") for name, _, _ in rows} == routes | {"GET /"}
    assert all(" " in said.strip() for _, _, said in rows)


def test_fields_are_marked_by_what_happens_to_them() -> None:
    lines = api_tables.markdown().splitlines()
    rows = {line.split("|")[1].strip(" `"): line for line in lines if line.startswith("| `")}
    assert rows["messages"].startswith("| `messages` | list of object | yes |  |")  # of chat, not of completions
    assert rows["echo"].count("yes") == 2
    assert rows["audio"].startswith("| `audio` | any | refused |  |")
    assert rows["prompt"].endswith("|  | yes | refused | refused |  |  |  |"), "of completions, not of responses"


def test_a_document_without_the_markers_is_refused() -> None:
    with pytest.raises(ConfigError, match="no lines"):
        api_tables.TABLES.written_in("# README")

"""The formats of models' answers, by the names on their cards."""

from pathlib import Path

from blockyard.shared.config.services.gateway import ParserPlugins
from blockyard.shared.messages import ModelCard, ModelSettings, ToolDefaults
from blockyard.shared.ring_client.request_fields.output_format import ModelFormats

PLUGIN = """
from dataclasses import replace
from pathlib import Path
from blockyard.shared.tool_parsers.registry import BY_NAME

with Path(__file__).with_name("runs").open("a") as runs:
    runs.write("x")
FORMAT = replace(BY_NAME["hermes"], name="own", aliases=())
"""


def card(parser: str) -> ModelCard:
    return ModelCard(["m"], "m", 8, 8, 0, [], ModelSettings(tools=ToolDefaults(parser=parser)))


def test_the_file_of_a_plugin_is_run_once_and_not_within_a_request(tmp_path: Path) -> None:
    plugin = tmp_path / "plugin.py"
    plugin.write_text(PLUGIN)
    formats = ModelFormats(ParserPlugins(tools=str(plugin)))
    for name in ("own", "hermes", "own"):
        found = formats.of(card(name)).tools
        assert found is not None and found.name == name
    assert (tmp_path / "runs").read_text() == "x"

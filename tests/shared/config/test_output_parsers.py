"""The flags of tool calls and reasoning, checked and settled before a process starts."""

from pathlib import Path

import msgspec
import pytest

from blockyard.services.launcher.models.model_files import demo_folder
from blockyard.shared.config import parsed_flags, resolve
from blockyard.shared.config.checkpoint import Checkpoint
from blockyard.shared.config.parser_documents import TABLES
from blockyard.shared.config.resolve import Deployment
from blockyard.shared.config.services.gateway import ParserPlugins
from blockyard.shared.config.services.process import BusConfig
from blockyard.shared.errors import ConfigError
from blockyard.shared.messages import ToolDefaults
from blockyard.shared.tool_parsers.registry import FORMATS

BUS = BusConfig(registry="ipc:///run/x/message-bus", bind="ipc:///run/x")
FAMILIES = Path(__file__).parents[3] / "shared/tool_parsers/FAMILIES.md"
THINKS = "{% if enable_thinking %}<think>{% endif %}"
HERMES = '{{ messages }}<tool_call>{"name": 1, "arguments": 2}'
PLUGIN = """
from blockyard.shared.reasoning_parsers.interface import ReasoningFormat
from blockyard.shared.reasoning_parsers.marked import marked
from blockyard.shared.tool_parsers.interface import ToolFormat
from blockyard.shared.tool_parsers.json_calls import families
read, write_grammar = families.HERMES.read, families.HERMES.write_grammar
OWN = ToolFormat(name="own", models="ours", read=read, write_grammar=write_grammar, template_marks=("OWN",))
NOTES = ReasoningFormat(name="notes", models="ours", start="<n>", end="</n>", read=marked("<n>", "</n>"))
"""


def deploy(*args: str, tokenizer: Path = Path("/t"), environ: dict[str, str] | None = None) -> Deployment:
    given, _ = parsed_flags.from_environment(environ or {})
    values = parsed_flags.Values(parsed_flags.from_command_line(args)[0], given)
    config = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096, "vocab_size": 4096}
    model = Checkpoint(name="org/m", path=Path("/m"), tokenizer_path=tokenizer, config=config)
    return resolve.resolve(values, model, BUS)


def tools(*args: str, **more: object) -> ToolDefaults:
    return deploy(*args, **more).scheduler.model.tools  # type: ignore[arg-type]


def test_without_flags_nothing_is_read() -> None:
    assert tools() == ToolDefaults()


def test_names_are_settled_and_an_alias_becomes_the_name() -> None:
    flags = ["--tool-call-parser", "hermes", "--enable-auto-tool-choice", "--reasoning-parser", "deepseek_r1"]
    assert tools(*flags) == ToolDefaults(
        auto_choice=True, parser="hermes", reasoning_parser="deepseek_r1", reasoning_end="</think>"
    )
    assert not tools("--tool-call-parser", "hermes").auto_choice
    assert tools("--tool-call-parser", "hermes", "--exclude-tools-when-tool-choice-none").exclude_when_none
    for one in FORMATS:
        for alias in one.aliases:
            assert tools("--tool-call-parser", alias).parser == one.name


def test_markers_of_reasoning_may_be_given() -> None:
    found = tools("--reasoning-parser", "think:<note>...</note>")
    assert (found.reasoning_parser, found.reasoning_end) == ("think:<note>...</note>", "</note>")
    with pytest.raises(ConfigError, match="think:START"):
        tools("--reasoning-parser", "think:<note>")


def test_the_environment_and_yaml_spell_them_alike() -> None:
    assert tools(environ={"BLOCKYARD_TOOL_CALL_PARSER": "hermes"}).parser == "hermes"
    yaml = parsed_flags.from_mapping({"tool-call-parser": "hermes", "enable_auto_tool_choice": True}, "serve.yaml")
    assert {name: one.value for name, one in yaml.items()} == {
        "tool-call-parser": "hermes",
        "enable-auto-tool-choice": True,
    }


def test_enable_reasoning_is_said_by_the_parser() -> None:
    ring = deploy("--enable-reasoning", "--reasoning-parser", "qwen3")
    assert ring.scheduler.model.tools.reasoning_parser == "qwen3"
    assert ring.notes == ["--enable-reasoning: --reasoning-parser is enough"]


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["--tool-call-parser", "hermis"], "--tool-call-parser hermis: known are .*hermes"),
        (["--reasoning-parser", "qwen33"], "--reasoning-parser qwen33: known are deepseek_r1, .*qwen3"),
        (
            ["--enable-auto-tool-choice"],
            "--enable-auto-tool-choice: needs --tool-call-parser NAME, or --tool-call-parser auto",
        ),
        (["--enable-reasoning"], "--enable-reasoning: needs --reasoning-parser NAME"),
        (["--tool-parser-plugin", "/no/such.py"], "--tool-parser-plugin /no/such.py: no such file"),
        (["--reasoning-parser-plugin", "/no/such.py"], "--reasoning-parser-plugin /no/such.py: no such file"),
        (
            ["--structured-outputs-config", '{"reasoning_parser": "qwen3"}', "--reasoning-parser", "deepseek_r1"],
            "--structured-outputs-config: reasoning_parser qwen3 and --reasoning-parser deepseek_r1 disagree",
        ),
        (
            ["--structured-outputs-config", '{"enable_in_reasoning": true}'],
            "--structured-outputs-config: enable_in_reasoning: not built yet",
        ),
    ],
)
def test_errors_are_one_line_and_name_the_flag(args: list[str], line: str) -> None:
    with pytest.raises(ConfigError, match=line) as refusal:
        deploy(*args)
    assert "\n" not in str(refusal.value)


def test_auto_picks_by_the_chat_template_and_says_so() -> None:
    auto = ["--tool-call-parser", "auto", "--enable-auto-tool-choice", "--reasoning-parser", "auto"]
    ring = deploy(*auto, "--chat-template", HERMES + THINKS)
    assert (ring.scheduler.model.tools.parser, ring.scheduler.model.tools.reasoning_parser) == ("hermes", "qwen3")
    assert ring.notes == [
        "--tool-call-parser auto: hermes, by the chat template",
        "--reasoning-parser auto: qwen3, by the chat template",
    ]
    ring = deploy(*auto, "--chat-template", "{{ messages }}")
    assert ring.scheduler.model.tools == ToolDefaults()
    assert [note.partition(": ")[2] for note in ring.notes] == [
        "the chat template has the marks of none that is known; tool calls stay in the text",
        "the chat template has the marks of none that is known; reasoning stays in the text",
    ]


def test_auto_reads_the_templates_of_the_tokenizers_folder(tmp_path: Path) -> None:
    auto = ["--tool-call-parser", "auto", "--enable-auto-tool-choice"]
    assert tools(*auto, tokenizer=demo_folder()).parser == "hermes"
    assert "has no chat template" in deploy(*auto, tokenizer=tmp_path).notes[0]
    both = [{"name": "default", "template": "{{ messages }}"}, {"name": "tool_use", "template": HERMES}]
    (tmp_path / "tokenizer_config.json").write_bytes(msgspec.json.encode({"chat_template": both}))
    assert tools(*auto, tokenizer=tmp_path).parser == "hermes"


def test_the_keys_of_structured_outputs_name_the_reasoning_parser() -> None:
    config = ["--structured-outputs-config", '{"reasoning_parser": "qwen3"}']
    assert tools(*config).reasoning_parser == "qwen3"
    assert tools(*config, "--reasoning-parser", "qwen3").reasoning_parser == "qwen3"


def test_formats_of_a_plugin_are_values_of_the_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine.py"
    path.write_text(PLUGIN)
    monkeypatch.chdir(tmp_path)  # the path that gateways get is absolute
    plugins = ["--tool-parser-plugin", "mine.py", "--reasoning-parser-plugin", "mine.py"]
    assert tools("--tool-call-parser", "own", "--reasoning-parser", "notes", *plugins) == ToolDefaults(
        parser="own",
        reasoning_parser="notes",
        reasoning_end="</n>",
        reasoning_start="<n>",
    )
    assert deploy(*plugins).gateways[0].parser_plugins == ParserPlugins(tools=str(path), reasoning=str(path))
    assert tools("--tool-call-parser", "auto", "--chat-template", "{{ 1 }} OWN" + HERMES, *plugins).parser == "own"
    assert tools("--tool-call-parser", "hermes", *plugins).parser == "hermes"
    assert deploy(*plugins).notes == [
        f"--tool-parser-plugin {path}: has no effect without --tool-call-parser",
        f"--reasoning-parser-plugin {path}: has no effect without --reasoning-parser",
    ]


def test_the_tables_of_formats_are_current() -> None:
    document = FAMILIES.read_text("utf-8")
    assert TABLES.written_in(document) == document, "run `blockyard parsers --write shared/tool_parsers/FAMILIES.md`"
    assert all(f"`{one.name}`" in TABLES.markdown() for one in FORMATS)

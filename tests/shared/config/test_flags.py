"""Every flag of vLLM is known: honoured, mapped or refused, and never ignored."""

from pathlib import Path

import pytest

from blockyard.shared.config import parsed_flags
from blockyard.shared.config.flags import FLAGS, GROUPS, NAMES, SPELLINGS, documents, vllm_only
from blockyard.shared.config.flags.flag import Flag, FlagKind
from blockyard.shared.config.parsed_flags import Values
from blockyard.shared.errors import ConfigError

DATA = Path(__file__).parent / "data"
FIELD_FLAGS = (DATA / "field_flags.txt").read_text().split()
NEWER_FLAGS = (DATA / "newer_field_flags.txt").read_text().split()
RESOLVE = Path(__file__).parents[3] / "shared/config"
SERVICES = Path(__file__).parents[3] / "services"


def example(flag: Flag) -> list[str]:
    """Returns command line words that set the flag to a value besides its default."""
    if flag.kind is FlagKind.BOOL:
        return ["false"] if flag.default else []
    if flag.kind is FlagKind.JSON:
        return ['{"a": 1}']
    if flag.kind is FlagKind.INTS:
        return ["1", "2"]
    if flag.kind in (FlagKind.INT, FlagKind.SIZE, FlagKind.FLOAT) and not flag.choices:
        value = (flag.default or 0) + 2 if isinstance(flag.default, int | float | None) else 2
        return [str(min(value, 1.0) if flag.le == 1 else value)]
    different = [choice for choice in (*flag.choices, *flag.refused_values) if choice != str(flag.default)]
    return [different[-1] if different else "/some/text"]


@pytest.mark.parametrize("spelled", [*FIELD_FLAGS, *NEWER_FLAGS])
def test_every_flag_of_the_field_has_an_effect_a_note_or_a_refusal(spelled: str) -> None:
    flag = NAMES[spelled[2:]]
    values, rest = parsed_flags.from_command_line([spelled, *example(flag)])
    assert not rest
    assert list(values) == [flag.name]
    if flag.status == "refused" or str(values[flag.name].value) in flag.refused_values:
        with pytest.raises(ConfigError) as refusal:
            Values(values)
        assert str(refusal.value).startswith(spelled)
        assert len(str(refusal.value).partition(": ")[2]) > 10
    elif flag.status == "mapped":
        assert [spelled in note for note in Values(values).notes()] == [True]
    else:
        assert Values(values).is_given(flag.name)
        assert not Values(values).notes()


def test_the_list_of_the_field_is_whole() -> None:
    assert len(set(FIELD_FLAGS)) == 141
    assert len({*NEWER_FLAGS} - {*FIELD_FLAGS}) == 218


@pytest.mark.parametrize("spelled", NEWER_FLAGS)
def test_a_refusal_says_what_to_use_or_what_is_missing(spelled: str) -> None:
    flag = NAMES[spelled[2:]]
    for reason in filter(None, (flag.refused, *flag.refused_values.values())):
        assert any(word in reason for word in ("not built yet: ", "use ", "leave it out")), reason


@pytest.mark.parametrize("flag", [flag for flag in FLAGS.values() if flag.status == "honoured"], ids=lambda f: f.name)
def test_an_honoured_flag_is_read_somewhere(flag: Flag) -> None:
    if flag.to:
        return
    if "." in flag.name:  # read as the flag after the point, of workers of a role
        return
    folders = [RESOLVE, RESOLVE / "server", RESOLVE / "pooling", SERVICES / "offline"]
    sources = [*(file for folder in folders for file in folder.glob("*.py")), *(SERVICES / "launcher").rglob("*.py")]
    fixed = flag.choices and {*flag.choices} <= {str(flag.default), "auto", "hf"}  # one value, the others are refused
    assert fixed or any(f'"{flag.name}"' in path.read_text() for path in sources), flag.name


def test_no_name_is_declared_twice() -> None:
    groups = (*GROUPS.values(), *vllm_only.GROUPS.values())
    names = [flag.name for group in groups for flag in group]
    aliases = [alias for flag in FLAGS.values() for alias in (*flag.short_names, *flag.other_names)]
    assert len(names + aliases) == len(set(names + aliases)) == len(SPELLINGS)


@pytest.mark.parametrize("flag", FLAGS.values(), ids=lambda f: f.name)
def test_the_default_given_explicitly_is_fine(flag: Flag) -> None:
    values = Values(parsed_flags.from_mapping({flag.name: flag.default}, "test"))
    assert values[flag.name] == flag.default
    assert values.notes() == []


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["--load-format", "tensorizer"], "--load-format tensorizer: not built yet: tensorizer files"),
        (["-spec-draft-tp", "2"], "-spec-draft-tp 2: not built yet: speculative decoding"),
        (["--device=tpu"], "--device tpu: foreign hardware: blockyard runs on cuda and cpu"),
        (["-q", "TPU_int8"], "-q tpu_int8: needs hardware that this project does not support"),
        (["--enable_mixed_moe_lora_format"], "--enable_mixed_moe_lora_format: not built yet: adapters of this kind"),
        (
            ["--tokenizer-mode", "slow"],
            "--tokenizer-mode slow: tokenizers are read from tokenizer.json alone; use auto",
        ),
    ],
)
def test_a_refusal_is_one_line_with_flag_and_reason(args: list[str], line: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        Values(parsed_flags.from_command_line(args)[0])
    assert str(refusal.value) == line


def test_all_refusals_are_said_at_once() -> None:
    with pytest.raises(ConfigError) as refusal:
        Values(parsed_flags.from_command_line(["--specialize-active-lora", "-spec-draft-tp", "4", "--port", "1"])[0])
    refused = [line.partition(":")[0] for line in str(refusal.value).splitlines()]
    assert refused == ["--specialize-active-lora", "-spec-draft-tp 4"]


def test_harmless_values_of_refused_flags_pass() -> None:
    Values(
        parsed_flags.from_command_line(
            ["-O0", "--no-specialize-active-lora", "--num-speculative-tokens", "0", "-tp", "1"]
        )[0]
    )


def test_help_names_every_flag_that_works() -> None:
    text = documents.help_text()
    assert all(f"--{flag.name}" in text for flag in FLAGS.values() if not flag.refused)
    assert "--specialize-active-lora" not in text
    assert "--specialize-active-lora" in documents.help_text(show_refused=True)


def test_the_table_has_a_row_for_every_flag() -> None:
    tables = documents.markdown() + documents.markdown(vllm_only.GROUPS)
    rows = [line for line in tables.splitlines() if line.startswith("| `--")]
    assert len(rows) == len(FLAGS)
    assert all(row.replace("\\|", "").count("|") == 4 for row in rows)


def test_the_table_of_flags_is_current() -> None:
    document = (RESOLVE / "FLAGS.md").read_text("utf-8")
    assert documents.with_table(document) == document, "run `blockyard flags --write shared/config/FLAGS.md`"


def test_a_document_without_the_markers_is_refused() -> None:
    with pytest.raises(ConfigError, match="no lines"):
        documents.with_table("# Blockyard\n")

"""All formats of reasoning, by the values of --reasoning-parser."""

from blockyard.shared.errors import ConfigError
from blockyard.shared.reasoning_parsers import families
from blockyard.shared.reasoning_parsers.interface import ReasoningFormat
from blockyard.shared.reasoning_parsers.marked import marked

OWN = "think"  # also with other markers: think:START...END
BETWEEN = "..."
FORMATS = (
    families.OPENAI_GPTOSS,
    families.GEMMA4,
    families.MISTRAL,
    families.SEED_OSS,
    families.MINIMAX_M2,
    families.MINIMAX_M2_APPEND_THINK,
    families.KIMI_K2,
    families.GLM45,
    families.HUNYUAN_A13B,
    families.GRANITE,
    families.NEMOTRON_V3,
    families.DEEPSEEK_R1,
    families.DEEPSEEK_V3,
    families.QWEN3,
    families.MIMO,
    families.OLMO3,
    families.ERNIE45,
    families.STEP3,
    families.HOLO2,
    ReasoningFormat(
        name=OWN,
        models=f"any; `{OWN}:START{BETWEEN}END` has other markers, and without START each answer begins with reasoning",
        start="<think>",
        end="</think>",
        read=marked("<think>", "</think>"),
        markers=("<think>", "</think>"),
    ),
)
BY_NAME = {name: one for one in FORMATS for name in (one.name, *one.aliases)}


def is_known(name: str) -> bool:
    return name in BY_NAME or name.startswith(f"{OWN}:")


def reasoning_format(name: str) -> ReasoningFormat:
    """Raises ConfigError for a name that is not known."""
    if name in BY_NAME:
        return BY_NAME[name]
    if is_known(name):
        return _with_own_markers(name)
    raise ConfigError(f"--reasoning-parser {name}: known are {', '.join(sorted(BY_NAME))}")


def _with_own_markers(name: str) -> ReasoningFormat:
    """The format of `think:START...END`, with that name. Raises ConfigError."""
    start, between, end = name.removeprefix(f"{OWN}:").partition(BETWEEN)
    if not between or not end.strip() or start == end:
        raise ConfigError(
            f"--reasoning-parser {name}: other markers are written as {OWN}:START{BETWEEN}END, "
            f"such as {OWN}:<note>{BETWEEN}</note>"
        )
    return ReasoningFormat(
        name=name,
        models="any",
        start=start,
        end=end,
        read=marked(start, end, opens_by_itself=not start),
        markers=(start, end) if start else (end,),
    )

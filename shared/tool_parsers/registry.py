"""All formats of tool calls, by the values of --tool-call-parser."""

from blockyard.shared.errors import ConfigError
from blockyard.shared.tool_parsers.channels.gemma import FUNCTIONGEMMA, GEMMA4
from blockyard.shared.tool_parsers.channels.openai import OPENAI
from blockyard.shared.tool_parsers.interface import ToolFormat
from blockyard.shared.tool_parsers.json_calls.ernie45 import ERNIE45
from blockyard.shared.tool_parsers.json_calls.families import GRANITE, HERMES, JAMBA, MINIMAX, PHI4_MINI_JSON
from blockyard.shared.tool_parsers.json_calls.granite_20b_fc import GRANITE_20B_FC
from blockyard.shared.tool_parsers.json_calls.hunyuan_a13b import HUNYUAN_A13B
from blockyard.shared.tool_parsers.json_calls.internlm import INTERNLM
from blockyard.shared.tool_parsers.json_calls.llama3_json import LLAMA3_JSON
from blockyard.shared.tool_parsers.json_calls.xlam import XLAM
from blockyard.shared.tool_parsers.json_sections.apertus import APERTUS
from blockyard.shared.tool_parsers.json_sections.cohere_command3 import COHERE_COMMAND3
from blockyard.shared.tool_parsers.json_sections.gigachat3 import GIGACHAT3
from blockyard.shared.tool_parsers.python_calls.marked_calls import LFM2, OLMO3
from blockyard.shared.tool_parsers.python_calls.pythonic import LLAMA4_PYTHONIC, PYTHONIC
from blockyard.shared.tool_parsers.token_calls.deepseek_v3 import DEEPSEEK_V3, DEEPSEEK_V31
from blockyard.shared.tool_parsers.token_calls.kimi_k2 import KIMI_K2
from blockyard.shared.tool_parsers.token_calls.mistral import MISTRAL
from blockyard.shared.tool_parsers.xml_calls.families import (
    DEEPSEEK_V4,
    DEEPSEEK_V32,
    GLM45,
    GLM47,
    MIMO,
    MINICPM5,
    MINIMAX_M2,
    QWEN3_CODER,
    SEED_OSS,
)
from blockyard.shared.tool_parsers.xml_calls.hy_v3 import HY_V3
from blockyard.shared.tool_parsers.xml_calls.longcat import LONGCAT
from blockyard.shared.tool_parsers.xml_calls.step3 import STEP3

FORMATS = (
    OPENAI,
    GEMMA4,
    FUNCTIONGEMMA,
    LFM2,
    OLMO3,
    LLAMA4_PYTHONIC,
    PYTHONIC,
    APERTUS,
    COHERE_COMMAND3,
    GIGACHAT3,
    DEEPSEEK_V32,
    DEEPSEEK_V4,
    HY_V3,
    GLM47,
    GLM45,
    MINICPM5,
    MINIMAX_M2,
    SEED_OSS,
    STEP3,
    MIMO,
    QWEN3_CODER,
    ERNIE45,
    GRANITE,
    GRANITE_20B_FC,
    HUNYUAN_A13B,
    INTERNLM,
    JAMBA,
    LONGCAT,
    MINIMAX,
    PHI4_MINI_JSON,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    KIMI_K2,
    LLAMA3_JSON,
    MISTRAL,
    XLAM,
    HERMES,
)
BY_NAME = {name: one for one in FORMATS for name in (one.name, *one.aliases)}
# known names that are not built, and what to say of them
NOT_BUILT: dict[str, str] = {
    "inkling": "it has no chat template that says how calls are written",
    "minimax_m3": "nested arguments, which it writes as tags in tags, are not read yet",
}


def tool_format(name: str) -> ToolFormat:
    """Raises ConfigError for a name that is not known, or not built."""
    if name in BY_NAME:
        return BY_NAME[name]
    if name in NOT_BUILT:
        raise ConfigError(f"--tool-call-parser {name} is not built: {NOT_BUILT[name]}")
    raise ConfigError(f"--tool-call-parser {name}: known are {', '.join(sorted(BY_NAME))}")

"""`auto` finds the format of a chat template by texts that the template has to contain."""

import pytest

from blockyard.shared.parser_plugins import format_of_template
from blockyard.shared.tool_parsers.registry import FORMATS

# what chat templates tell the model, or write of an earlier call, in the template's own spelling
TEMPLATES = {
    "apertus": "{%- set tool_calls_token = '<|tools_prefix|>' -%}{%- set end = '<|tools_suffix|>' -%}",
    "cohere_command3": '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "{{ name }}", "parameters": {}}]',
    "gigachat3": """role_sep="<|role_sep|>\\n", {{- '{"name": "' ~ call['name'] ~ '", "arguments": ' -}}""",
    "deepseek_v32": '<{{ dsml_token }}function_calls>{%- set dsml_token = "｜DSML｜" -%}',
    "deepseek_v4": '{%- set dsml_token = "｜DSML｜" -%}<{{ dsml_token }}tool_calls>',
    "hy_v3": "'<tool_calls{}>'.format(HYTK) '<tool_sep{}>'.format(HYTK) '<arg_key{}>'.format(HYTK)",
    "glm45": "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>",
    "glm47": "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value>",
    "minicpm5": '<function name="function-name"><param name="param-name">param-value</param></function>',
    "minimax_m2": '\'<minimax:tool_call>\' <invoke name="tool-name-1">\n<parameter name="param-key-1">',
    "seed_oss": "<seed:tool_call>\\n<function=a>\\n<parameter=example_parameter_1>value_1</parameter>",
    "step3": 'function<｜tool_sep｜><steptml:invoke name=\\"tool_name0\\">',
    "mimo": "<tool_call>\\n<function=a>\\n<parameter=example_parameter_1>value_1</parameter>",
    "qwen3_coder": "<tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>\\nvalue_1\\n",
    "hermes": '<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>',
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_tells_its_format(name: str) -> None:
    found = format_of_template(TEMPLATES[name], FORMATS)
    assert found is not None and found.name == name

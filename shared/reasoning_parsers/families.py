"""How the families of models mark their reasoning, from their chat templates and model cards.

Where the template opens or closes reasoning for the model, the prompt's end tells. Where it does neither, the default
is what the model does by itself: families whose answers always reason open it.
"""

from blockyard.shared.reasoning_parsers.interface import ReasoningFormat
from blockyard.shared.reasoning_parsers.marked import marked
from blockyard.shared.reasoning_parsers.special_forms import between, kept_in_content
from blockyard.shared.tool_parsers.channels import openai

START, END = THINK = ("<think>", "</think>")
MISTRAL_THINK = ("[THINK]", "[/THINK]")
SEED_THINK = ("<seed:think>", "</seed:think>")
GEMMA_THOUGHT = ("<|channel>thought", "<channel|>")
GRANITE_STARTS = ("Here is my thought process:", "Here's my thought process:", START)
GRANITE_ENDS = ("Here is my response:", "Here's my response:", END)


def _thinks(
    name: str,
    models: str,
    *,
    opens_by_itself: bool = False,
    calls: tuple[str, ...] = (),
    template_marks: tuple[str, ...] = (),
    answer_marks: tuple[str, ...] = (),
) -> ReasoningFormat:
    """Reasoning between <think> and </think>. `calls`: markers of tool calls, which end it if the model forgot to."""
    return ReasoningFormat(
        name=name,
        models=models,
        start=START,
        end=END,
        read=marked(*THINK, opens_by_itself=opens_by_itself, also_ends_before=calls),
        markers=(*THINK, *answer_marks),
        template_marks=template_marks,
        other_ends=calls,
        answer_marks=answer_marks,
    )


DEEPSEEK_R1 = _thinks(
    "deepseek_r1",
    "DeepSeek R1 and its distillations, QwQ",
    opens_by_itself=True,
    template_marks=("<｜Assistant｜><think>",),
)
DEEPSEEK_V3 = _thinks(
    "deepseek_v3",
    "DeepSeek V3.1 and later; `thinking` of the template switches it on",
    calls=("<｜tool▁calls▁begin｜>",),
    template_marks=("<｜Assistant｜>", "thinking = false"),
)
QWEN3 = _thinks("qwen3", "Qwen 3", calls=("<tool_call>",), template_marks=("<think>", "enable_thinking"))
MIMO = _thinks("mimo", "MiMo", calls=("<tool_call>",))
GLM45 = _thinks("glm45", "GLM 4.5 and later", calls=("<tool_call>",), template_marks=("[gMASK]", "<think>"))
KIMI_K2 = _thinks(
    "kimi_k2",
    "Kimi K2 Thinking, K2.5",
    calls=("<|tool_calls_section_begin|>",),
    template_marks=("<|im_middle|>", "<think>"),
)
OLMO3 = _thinks("olmo3", "Olmo 3 Think", opens_by_itself=True)
HUNYUAN_A13B = _thinks(
    "hunyuan_a13b",
    "Hunyuan A13B; `enable_thinking` of the template switches it off",
    calls=("<tool_calls>",),
    template_marks=("<|extra_0|>", "<think>"),
    answer_marks=("<answer>", "</answer>"),
)
ERNIE45 = _thinks(
    "ernie45",
    "ERNIE 4.5 Thinking",
    opens_by_itself=True,
    calls=("<tool_call>",),
    answer_marks=("<response>", "</response>"),
)
STEP3 = _thinks("step3", "Step 3", opens_by_itself=True, calls=("<｜tool_calls_begin｜>",))
MINIMAX_M2 = _thinks(
    "minimax_m2",
    "MiniMax M2",
    opens_by_itself=True,
    calls=("<minimax:tool_call>",),
    template_marks=("]~b]", "<think>"),
)
NEMOTRON_V3 = _thinks(
    "nemotron_v3",
    "Nemotron 3",
    opens_by_itself=True,
    calls=("<tool_call>",),
    template_marks=("truncate_history_thinking", "<think>"),
)
HOLO2 = _thinks("holo2", "Holo2; `thinking` of the template switches it off", opens_by_itself=True)
MINIMAX_M2_APPEND_THINK = ReasoningFormat(
    name="minimax_m2_append_think",
    models="MiniMax M2; reasoning stays in the content, with its markers",
    start=START,
    end=END,
    read=kept_in_content(*THINK),
    markers=THINK,
)
MISTRAL = ReasoningFormat(
    name="mistral",
    models="Magistral, Ministral 3 Reasoning",
    start=MISTRAL_THINK[0],
    end=MISTRAL_THINK[1],
    read=marked(*MISTRAL_THINK, also_ends_before=("[TOOL_CALLS]",)),
    markers=MISTRAL_THINK,
    other_ends=("[TOOL_CALLS]",),
    template_marks=("[THINK]",),
)
SEED_OSS = ReasoningFormat(
    name="seed_oss",
    models="Seed OSS",
    start=SEED_THINK[0],
    end=SEED_THINK[1],
    read=marked(*SEED_THINK, also_ends_before=("<seed:tool_call>",)),
    markers=SEED_THINK,
    other_ends=("<seed:tool_call>",),
    template_marks=("<seed:think>",),
)
GRANITE = ReasoningFormat(
    name="granite",
    models="Granite 3.2 and 3.3; `thinking` of the template switches it on",
    start=GRANITE_STARTS[0],
    end=GRANITE_ENDS[0],
    read=between(GRANITE_STARTS, GRANITE_ENDS),
    other_ends=GRANITE_ENDS[1:],
    template_marks=("Granite, developed by IBM", "thought process"),
    answer_marks=("<response>", "</response>"),
)
GEMMA4 = ReasoningFormat(
    name="gemma4",
    models="Gemma 4; `enable_thinking` of the template switches it on",
    start=GEMMA_THOUGHT[0],
    end=GEMMA_THOUGHT[1],
    read=marked(*GEMMA_THOUGHT, also_ends_before=("<|tool_call>",)),
    markers=("<|channel>", "<channel|>"),
    other_ends=("<|tool_call>",),
    template_marks=("<|channel>thought",),
)
OPENAI_GPTOSS = ReasoningFormat(
    name="openai_gptoss",
    models="gpt-oss",
    start="<|channel|>analysis<|message|>",
    end=openai.FINAL,
    read=openai.read_reasoning,
    markers=openai.MARKERS,
    template_marks=("<|channel|>analysis<|message|>",),
)

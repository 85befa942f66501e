import pytest
from recorded_answers import Answer, call, check_answer, check_held_back, check_mutations, content, tool_reader

from blockyard.shared.output_parsing.parts import Part
from blockyard.shared.tool_parsers.channels.gemma import FUNCTIONGEMMA, GEMMA4
from blockyard.shared.tool_parsers.interface import ToolFormat

WEATHER = call("get_weather", '{"city": "Paris", "days": 3}')
TIME = call("get_time", "{}")
ONE = "S+call:get_weather{city:Q+ParisQ+,days:3}E+"
# S+, E+ and Q+ stand for the markers of the family
ANSWERS = (
    Answer("none", "It is {fine}, call:me < 5.", content("It is {fine}, call:me < 5.")),
    Answer("one", ONE, WEATHER),
    Answer("several", ONE + "S+call:get_time{}E+", WEATHER + TIME),
    Answer(
        "nested",
        'S+call:search{exact:true,filter:{n:[1,-2.5,[]],tags:[Q+xQ+,Q+]},Q+]},query:Q+a "b" }\\Q+,score:null}E+',
        call(
            "search",
            '{"exact": true, "filter": {"n": [1, -2.5, []], "tags": ["x", "]},"]}, "query": "a \\"b\\" }\\\\", '
            '"score": null}',
        ),
    ),
    Answer(
        "unicode and lines",
        "S+call:search{query:Q+Zürich\n東京 😀\tQ+}E+",
        call("search", '{"query": "Zürich\\n東京 😀\\t"}'),
    ),
    Answer("text around", f"Looking.\n{ONE}\nDone.", content("Looking.\n") + WEATHER + content("Done.")),
    Answer("cut short", "S+call:search{query:Q+half", call("search", '{"query": "half')),
    Answer("cut in a number", "S+call:get_weather{days:1", call("get_weather", '{"days": 1')),
    Answer("cut before the arguments", "S+call:sear", content("S+call:sear")),
    Answer("no end", "S+call:get_time{}", TIME),
    Answer("malformed beginning", "a S+search{}E+", content("a S+search{}E+")),
    Answer("a name with spaces", "S+call:get the time{}E+", content("S+call:get the time{}E+")),
    Answer(
        "brackets do not close",
        "S+call:search{filter:{tags:[1E+ b",
        call("search", '{"filter": {"tags": [1') + content("b"),
    ),
    Answer("words", "S+call:search{query:a b,score:1a}E+", call("search", '{"query": "a b", "score": "1a"}')),
    Answer(
        "whitespace behind a long number",
        f"S+call:search{{score:[{'7' * 250}\n     ,{'7' * 300}\n  ],query:{'8' * 254}  }}E+",
        call("search", f'{{"score": [{"7" * 250}, {"7" * 300}], "query": {"8" * 254}}}'),
    ),
    Answer("a marker in a text", "S+call:search{query:Q+E+ S+Q+}E+", call("search", '{"query": "E+ S+"}')),
    Answer("JSON", 'S+call:search{"query": "a\\"}\\n"}E+', call("search", '{"query": "a\\"}\\n"}')),
    Answer("keys with quotes", "S+call:search{Q+queryQ+:Q+aQ+}E+", call("search", '{"query": "a"}')),
    Answer("no value", "S+call:search{query:}E+", call("search", '{"query": ') + content("}E+")),
)  # fmt: skip
EACH = pytest.mark.parametrize("tool_format", [GEMMA4, FUNCTIONGEMMA], ids=lambda one: one.name)


def spelt(text: str, tool_format: ToolFormat) -> str:
    for sign, marker in zip(("S+", "E+", "Q+"), tool_format.markers, strict=True):
        text = text.replace(sign, marker)
    return text


def answers(tool_format: ToolFormat) -> list[Answer]:
    return [
        Answer(
            one.name,
            spelt(one.text, tool_format),
            tuple(Part(part.kind, spelt(part.text, tool_format)) for part in one.parts),
        )
        for one in ANSWERS
    ]


@EACH
@pytest.mark.parametrize("index", range(len(ANSWERS)), ids=lambda i: ANSWERS[i].name)
def test_answers_have_their_parts(tool_format: ToolFormat, index: int) -> None:
    check_answer(tool_reader(tool_format), answers(tool_format)[index])


@EACH
def test_damaged_answers(tool_format: ToolFormat) -> None:
    check_mutations(tool_reader(tool_format), answers(tool_format), 500, tool_format.markers)


@EACH
def test_little_is_held_back(tool_format: ToolFormat) -> None:
    start = tool_format.markers[0]
    check_held_back(tool_reader(tool_format), f"a {start[:-1]} b {start[:3]}{start[:5]} c", len(start))

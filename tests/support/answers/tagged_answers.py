"""Answers of formats with each argument in tags of its own, in the tags of one of them."""

from collections.abc import Callable

from recorded_answers import Answer, call, content

Values = dict[str, str]  # the text of each argument
WriteCall = Callable[[str, Values], str]  # one call with its tags, as the format's template writes it
PYTHON_VALUES = {  # the text of an object or list, and its JSON
    "{'k': 1, 'b': True, 'n': None}": '{"k": 1, "b": true, "n": null}',
    "{'s': \"it's\", 'l': [(1, 2.5), {'m': 'n'}],}": '{"s": "it\'s", "l": [[1, 2.5], {"m": "n"}]}',
    "{\"k\": False, 'l': [1, 'a', None]}": '{"k": false, "l": [1, "a", null]}',
    "[{'k': 'v'}, 1]": '[{"k": "v"}, 1]',
    "(1, 'b')": '[1, "b"]',
    "{'k': <1>}": "\"{'k': <1>}\"",
    "{'k': 1} q": "\"{'k': 1} q\"",
    "{k: 1": '"{k: 1"',
}
PARIS = call("get_weather", '{"city": "Paris", "days": 3}')


def tagged_answers(begin: str, write: WriteCall, between: str, end: str, value_end: str) -> tuple[Answer, ...]:
    """The answers that every such format has to read. `begin` and `end` stand around all calls of an answer.

    `value_end` is the closing tag of a value.
    """

    def calls(*written: str) -> str:
        return begin + between.join(written) + end

    paris = write("get_weather", {"city": "Paris", "days": "3"})
    three = write("get_weather", {"days": "3", "city": "Paris"})
    code = 'if a < b && c > "d":\n    print("</b>\\n")\n\n'
    return (
        Answer("none", "It is sunny < 5 and <b>fine</b>.", content("It is sunny < 5 and <b>fine</b>.")),
        Answer("one", calls(paris), PARIS),
        Answer("several", calls(paris, write("get_time", {}), paris), PARIS + call("get_time", "{}") + PARIS),
        Answer("no arguments", calls(write("get_time", {})), call("get_time", "{}")),
        Answer(
            "nested",
            calls(
                write("search", {"filter": '{"tags": ["x", "]}", {"y": null}]}', "exact": "true", "score": "-1.5e3"})
            ),
            call("search", '{"filter": {"tags": ["x", "]}", {"y": null}]}, "exact": true, "score": -1.5e3}'),
        ),
        Answer(
            "unicode",
            calls(write("search", {"query": "Zürich 東京 \\u00e9 😀"})),
            call("search", '{"query": "Zürich 東京 \\\\u00e9 😀"}'),
        ),
        Answer(
            "text around",
            f"Let me look.\n\n{calls(paris)}\nDone <tool> now.",
            content("Let me look.\n\n") + PARIS + content("Done <tool> now."),
        ),
        Answer(
            "code in a string",
            calls(write("search", {"query": code})),
            call("search", '{"query": "if a < b && c > \\"d\\":\\n    print(\\"</b>\\\\n\\")\\n\\n"}'),
        ),
        Answer("a closing tag is missing", calls(paris.replace(value_end, "", 1), paris), PARIS + PARIS),
        Answer("the last closing tag is missing", calls("".join(paris.rsplit(value_end, 1)), paris), PARIS + PARIS),
        Answer(
            "all closing tags are missing",
            calls(three.replace(value_end, ""), paris),
            call("get_weather", '{"days": 3, "city": "Paris"}') + PARIS,
        ),
        Answer("an empty string", calls(write("search", {"query": ""})), call("search", '{"query": ""}')),
        Answer(
            "a string stays one",
            calls(write("get_weather", {"city": "12", "days": "many"})),
            call("get_weather", '{"city": "12", "days": "many"}'),
        ),
        Answer(
            "unknown arguments",
            calls(write("get_time", {"zone": "UTC+1", "offset": "2", "list": "[1, [2]]", "no list": "[1, 2"})),
            call("get_time", '{"zone": "UTC+1", "offset": 2, "list": [1, [2]], "no list": "[1, 2"}'),
        ),
        Answer(
            "an unknown tool",
            calls(write("other", {"a": "b c"})),
            call("other", '{"a": "b c"}'),
        ),
        Answer(
            "text behind JSON",
            calls(write("search", {"filter": '{"tags": []} q', "exact": "false"})),
            call("search", '{"filter": {"tags": []} q, "exact": false}'),
        ),
        *(
            Answer(
                f"Python's spelling: {value}",
                calls(write("search", {"filter": value, "exact": "true"})),
                call("search", f'{{"filter": {expected}, "exact": true}}'),
            )
            for value, expected in PYTHON_VALUES.items()
        ),
        Answer(
            "cut short",
            calls(write("search", {"query": "half of it"})).partition(" of it")[0],
            call("search", '{"query": "half'),
        ),
    )

"""Answers that every format of calls with JSON arguments has to read: a family spells them, and adds its own."""

from collections.abc import Callable

from recorded_answers import Answer, call, content

Call = tuple[str, str]  # a tool's name, and its arguments
WEATHER: Call = ("get_weather", '{"city": "Paris", "days": 3}')
TIME: Call = ("get_time", "{}")


def common_answers(spell: Callable[..., str], markers: tuple[str, ...], rest: str = "Done <tool> now.") -> list[Answer]:
    """`spell` writes calls as the family does. `rest` is what a client sees of a text in the line behind a call."""
    nested = '{"query": "a \\"b\\" }], [{", "filter": {"tags": ["x", "]", "}"], "n": [[1, {"a": null}]]}}'
    unicode = '{"query": "Zürich 東京 \\u00e9 \\ud83d\\ude00 😀\\n"}'
    quoted = '{"query": "' + " ".join(markers) + '"}'
    one, search = spell(WEATHER), spell(("search", '{"query": "half way"}'))
    return [
        Answer("none", "It is sunny < 5, [1] and {fine}.", content("It is sunny < 5, [1] and {fine}.")),
        Answer("one", one, call(*WEATHER)),
        Answer("several", spell(WEATHER, TIME, WEATHER), call(*WEATHER) + call(*TIME) + call(*WEATHER)),
        Answer("no arguments", spell(TIME), call(*TIME)),
        Answer("nested", spell(("search", nested)), call("search", nested)),
        Answer("unicode", spell(("search", unicode)), call("search", unicode)),
        Answer("markers in a text", spell(("search", quoted), TIME), call("search", quoted) + call(*TIME)),
        Answer(
            "text around",
            f"Let me look.\n{one}\nDone <tool> now.",
            content("Let me look.\n") + call(*WEATHER) + content(rest),
        ),
        Answer("cut short", search[: search.index(" way")], call("search", '{"query": "half')),
        Answer("null for arguments", spell(("search", "null"), WEATHER), call("search", "{}") + call(*WEATHER)),
        Answer("null in a text", spell(("search", '"null"'), ("get_time", '""')), call("search", "{}") + call(*TIME)),
        Answer("a text for arguments", spell(("search", '"Paris"')), call("search", '"Paris"')),
        Answer("arguments that are no JSON", spell(("search", "Paris")), content(spell(("search", "Paris")))),
        Answer("cut in the name", search[: search.index("arch")], content(search[: search.index("arch")])),
    ]

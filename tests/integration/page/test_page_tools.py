"""The playground's tools in headless Chromium: calls, their results, and fields that hold JSON."""

import json
from typing import Any

import pytest
from playground import QUESTION, FakeGateway, Page, no_faults
from rig import Server
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

SEARCH, NOTE = {"type": "function", "function": {"name": "search"}}, {"type": "custom", "custom": {"name": "note"}}
TOOLS = json.dumps([SEARCH, NOTE])
SIZE = {"type": "object", "properties": {"size": {"enum": ["small", "large"]}}, "required": ["size"]}
CHOOSE = {"type": "function", "function": {"name": "choose", "parameters": SIZE | {"additionalProperties": False}}}
BROKEN = {  # what is typed: where it breaks, and how the message goes on
    "[not JSON": ("line 1, column 2", "expected a value or “]”, found “not”"),
    '[{"a": 1},\n  {"b": 2},\n]': ("line 3, column 1", "expected a value, found “]”"),
    '[{"a": 1,}]': ("line 1, column 10", "expected a name in double quotes, found “}”"),
    "[{'a': 1}]": ("line 1, column 3", "expected a name in double quotes or “}”"),
    '[{"é😀" 1}]': ("line 1, column 8", "expected “:”, found “1”"),
    "[1\n 2]": ("line 2, column 2", "expected “,” or “]”"),
    '["a\nb"]': ("line 1, column 2", "closing quote"),
    '["\\x"]': ("line 1, column 3", "no escape"),
    "[01]": ("line 1, column 2", "expected a value"),
    "[1] x": ("line 1, column 5", "expected the end, found “x”"),
    '[\n[{"a": [': ("line 2, column 9", "ends before the “[” of line 2, column 8 is closed"),
    '"[]"': ("", "must be a list"),
    "{}": ("", "must be a list"),
}
SAMPLE = '{"a": [1, -2.5e3, {"b\\u00e9": null}], "c": "x\\n", "d": [true, {}]}'


def fill(page: Page, selector: str, value: str) -> None:
    """Sets a field's text as pasting does."""
    script = "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('input', {bubbles: true}))"
    page.driver.execute_script(script, page.one(selector), value)


@pytest.mark.parametrize("text", BROKEN)
def test_broken_json_is_reported_beside_its_field(page: Page, text: str) -> None:
    fill(page, "#p-tools", text)
    place, words = BROKEN[text]
    seen = page.one("#p-tools-fault").text
    assert seen.startswith(place) and words in seen
    fill(page, "#p-tools", "[]")
    assert not page.one("#p-tools-fault").is_displayed()


def test_what_the_page_takes_for_json_is_json(page: Page) -> None:
    texts = [
        SAMPLE[:i] + new + SAMPLE[i + 1 :] for i in range(len(SAMPLE)) for new in ("", ",", '"', "}", "0", "\\", "\n")
    ]
    script = """
        const parses = (text) => { try { JSON.parse(text); return true; } catch { return false; } };
        const { findFault } = await import("/page/json_fields.js");
        return texts.filter((text) => parses(text) !== (findFault(text) === null));
    """
    assert page.driver.execute_script(f"return (async (texts) => {{{script}}})(arguments[0])", texts) == []


def test_send_says_why_it_sends_nothing(page: Page, fake: FakeGateway) -> None:
    page.set("temperature", "1e")  # reads as empty
    page.ask("Hello")
    assert "Temperature: is not a number" in page.one("#pane-chat .notice").text
    page.set("temperature", "1")
    faults = {"tools": "[1,", "schema": "[]", "extra": '{"a" 1}'}
    for name, text in faults.items():
        page.set(name, text)
        page.one("#chat-input").clear()
        page.ask("Hello")
        notice = page.one("#pane-chat .notice")
        assert "Not sent" in notice.text and page.one(f"#p-{name}-fault").text in notice.text
        assert page.one("#chat-input").get_attribute("value") == "Hello"
        notice.find_element(By.TAG_NAME, "button").click()
        assert page.driver.switch_to.active_element == page.one(f"#p-{name}")
        assert page.one(f"#p-{name}").get_attribute("aria-invalid") == "true"
        fill(page, f"#p-{name}", "")
        assert not notice.is_displayed()
    page.set("tools", "[")
    page.one("#tab-completion").click()  # has no tools
    page.ask("def f(", "completion")
    page.finished()
    page.one("#tab-chat").click()
    page.one("#params-reset").click()
    assert not page.one("#p-tools-fault").is_displayed()
    page.one("#chat-input").clear()
    page.one("#chat-input").send_keys(Keys.ENTER)
    assert "no message" in page.one("#pane-chat .notice").text
    page.ask("endless")
    page.ask("more")
    assert "on its way" in page.one("#pane-chat .notice").text
    page.one("body").send_keys(Keys.ESCAPE)
    page.finished(2)
    assert not page.one("#pane-chat .notice").is_displayed() and len(fake.requests) == 2


def test_the_extra_body_wins_and_leaves_the_stream(page: Page, fake: FakeGateway) -> None:
    extra = {"max_tokens": 7, "response_format": {"type": "json_object"}, "stream": False}
    page.set("extra", json.dumps(extra))
    page.ask("Hello")
    page.finished()
    assert fake.requests[-1].items() >= (extra | {"stream": True}).items()
    page.one("#params-reset").click()


def test_json_fields_are_monospaced_and_large(page: Page) -> None:
    for name in ("schema", "tools", "extra"):
        field = page.one(f"#p-{name}")
        assert "mono" in field.value_of_css_property("font-family") and field.size["height"] >= 100
        width = field.size["width"]
        page.one("#params-wide").click()
        assert field.size["width"] > 1.4 * width
        page.one("#params-wide").click()


def test_tools_are_sent_and_calls_and_reasoning_are_shown(page: Page, fake: FakeGateway) -> None:
    page.set("tools", TOOLS)
    page.one("#p-tool-choice option[value=required]").click()
    page.ask("Look")
    page.finished()
    assert (fake.requests[-1]["tools"], fake.requests[-1]["tool_choice"]) == ([SEARCH, NOTE], "required")
    assert page.text(".call b") == "search\nnote"
    assert page.text(".call pre") == '{"q": "Hé"}\n{"q": "Hé"}'
    assert page.text(".reasoning div") == "I <b>look." and not page.one(".reasoning div").is_displayed()
    page.one(".reasoning summary").click()
    assert page.one(".reasoning div").is_displayed()
    assert "calls tools" in page.text(".figures") and "3 reasoning" in page.text(".figures")
    assert page.text(".answer .body") == ""
    page.one("#params-reset").click()
    page.ask("No tools")
    page.finished(answers=2)
    assert not {"tools", "tool_choice"} & fake.requests[-1].keys()
    assert [message["role"] for message in fake.requests[-1]["messages"]] == ["user", "assistant", "user"]


def test_results_of_calls_go_back_and_can_be_edited(page: Page, fake: FakeGateway) -> None:
    page.set("tools", TOOLS)
    page.ask("Look")
    page.finished()
    results = page.all(".result textarea")
    assert [field.get_attribute("aria-label") for field in results] == ["Result of search", "Result of note"]
    results[0].send_keys('{"hits": 2}')
    page.all(".result button")[1].click()
    assert "error" in str(results[1].get_attribute("value"))
    results[1].send_keys("no paper")  # in place of the selected words
    page.one(".results button").click()
    page.finished(answers=2)
    search = {"id": "call_0", "type": "function", "function": {"name": "search", "arguments": '{"q": "Hé"}'}}
    note = {"id": "call_1", "type": "custom", "custom": {"name": "note", "input": '{"q": "Hé"}'}}
    calls = {"role": "assistant", "content": None, "reasoning_content": "I <b>look.", "tool_calls": [search, note]}
    begin: list[dict[str, Any]] = [{"role": "user", "content": "Look"}, calls]
    hits = {"role": "tool", "tool_call_id": "call_0", "content": '{"hits": 2}'}
    failed = {"role": "tool", "tool_call_id": "call_1", "content": '{"error": "no paper"}'}
    assert fake.requests[-1]["messages"] == [*begin, hits, failed]
    assert page.all(".answer .prose")
    page.ask("Thanks")
    page.finished(answers=3)
    assert [m["role"] for m in fake.requests[-1]["messages"][2:]] == ["tool", "tool", "assistant", "user"]
    results[0].send_keys(Keys.CONTROL, "a", Keys.NULL, "none", Keys.CONTROL, Keys.ENTER, Keys.NULL)
    page.until(lambda: len(page.all(".answer")) == 2, "the later messages gone")
    page.finished(answers=2)
    assert fake.requests[-1]["messages"] == [*begin, hits | {"content": "none"}, failed]
    assert len(page.all(".question")) == 1
    page.one("#params-reset").click()


def test_a_message_takes_the_written_results_along(page: Page, fake: FakeGateway) -> None:
    page.set("tools", TOOLS)
    page.ask("Look")
    page.finished()
    page.one(".result textarea").send_keys("nothing")
    page.ask("And now?")
    page.finished(answers=2)
    messages = fake.requests[-1]["messages"]
    assert [(m["role"], m.get("tool_call_id")) for m in messages[2:]] == [("tool", "call_0"), ("user", None)]
    page.one("#chat-input").send_keys(Keys.ENTER)  # nothing written: the empty results are meant
    page.finished(answers=3)
    assert [(m["role"], m["content"]) for m in fake.requests[-1]["messages"][-2:]] == [("tool", ""), ("tool", "")]
    page.one("#params-reset").click()


def test_colours_show_a_call_once_and_earlier_answers_say_that_they_have_none(page: Page) -> None:
    page.set("tools", TOOLS)
    page.ask("Look")
    page.finished()
    assert "no token colours" not in page.text(".figures")
    page.one(".switch").click()
    assert "no token colours: they were off" in page.text(".figures")
    page.one(".actions button").click()  # Again
    page.until(lambda: page.all(".answer:not(.streaming) .call .token"), "coloured arguments")
    page.finished()
    assert "no token colours" not in page.text(".figures")
    assert page.text(".answer .body") == "" and page.text(".call pre") == '{"q": "Hé"}\n{"q": "Hé"}'
    assert [span.get_attribute("textContent") for span in page.all(".reasoning .token")] == ["I <b>", "look."]
    assert [span.get_attribute("textContent") for span in page.all(".call .token")] == ['{"q": ', '"Hé"', "}"] * 2
    page.one(".switch").click()
    assert not page.all(".tokens") and page.text(".call pre") == '{"q": "Hé"}\n{"q": "Hé"}'
    page.one("#params-reset").click()


def test_the_demo_model_calls_a_tool_and_gets_its_result(browser: webdriver.Chrome, demo: Server) -> None:
    page = Page(browser, f"{demo.url}/")
    page.one("#params-reset").click()  # earlier tests of this browser have set the most tokens
    page.set("tools", json.dumps([CHOOSE]))
    page.one("#p-tool-choice option[value=required]").click()
    page.one(".switch").click()
    page.ask(QUESTION)
    done = ".answer:not(.streaming) .call"
    page.until(lambda: len(page.all(".call")) > 1 or page.all(done), "the end of a call")
    page.one("body").send_keys(Keys.ESCAPE)
    page.finished()
    box = page.all(".call")[0]
    assert box.find_element(By.CSS_SELECTOR, "b").text == "choose"
    arguments = str(box.find_element(By.CSS_SELECTOR, "pre").get_attribute("textContent"))
    assert json.loads(arguments)["size"] in ("small", "large")
    assert box.find_elements(By.CSS_SELECTOR, ".token") and page.text(".answer .body") == ""
    page.one("#p-tool-choice option[value=none]").click()
    page.set("max_tokens", "32")
    page.one(".result textarea").send_keys('{"chosen": true}')
    page.one(".results button").click()
    page.finished(answers=2)
    assert not page.all(".error") and page.all(".answer")[1].find_elements(By.CSS_SELECTOR, ".body .token")
    page.one(".switch").click()
    page.one("#params-reset").click()
    no_faults(browser)

"""The playground in headless Chromium.

Tests that take `any_page` hold for any gateway and run against a fake one and the demo model's ring.
Tests that take `fake` need its canned answers or its view of what the page sent.
"""

import pytest
from playground import PATIENCE_S, QUESTION, ROLES, FakeGateway, Page
from selenium import webdriver
from selenium.webdriver.common.keys import Keys

# keeps the first words of an answer that streams, which may be over before the driver looks again
KEEP_FIRST_WORDS = """
new MutationObserver(() => {
  window.firstWords ||= document.querySelector(".answer.streaming .body")?.textContent;
}).observe(document.body, { subtree: true, childList: true, characterData: true });
"""


def test_chat_streams_and_shows_its_figures(any_page: Page) -> None:
    page = any_page
    page.driver.execute_script(KEEP_FIRST_WORDS)
    page.ask(QUESTION)
    early = page.until(lambda: page.driver.execute_script("return window.firstWords"), "the first words")
    page.finished()
    assert len(page.text(".answer .body")) > len(early)
    assert page.text(".question") == QUESTION
    assert all(figure in page.text(".figures") for figure in ("to first token", "tokens/s", "in", "out"))
    page.ask("And again")
    page.finished(answers=2)
    page.one("#reset").click()
    assert page.one("#chat-intro").is_displayed() and not page.all(".message")


def test_completion_goes_on_from_the_prompt(any_page: Page) -> None:
    page = any_page
    page.one("#tab-completion").click()
    page.ask("def f(", "completion")
    page.finished()
    assert page.text(".given") == "def f(" and page.text(".continued .body")


@pytest.mark.parametrize("pane", ["chat", "completion"])
def test_tokens_are_coloured_and_name_the_other_candidates(any_page: Page, pane: str) -> None:
    page = any_page
    page.one(f"#tab-{pane}").click()
    page.one(".switch").click()
    page.ask(QUESTION if pane == "chat" else "def f(", pane)
    page.finished()
    spans = page.all(".answer .tokens .token")[:5]
    assert len(spans) >= 2 and page.one("#legend").is_displayed()
    assert "rgba(0, 0, 0, 0)" not in [span.value_of_css_property("background-color") for span in spans]
    page.driver.execute_script("arguments[0].focus()", spans[0])
    page.until(lambda: page.one("#token-tip").is_displayed(), "the card of the first token")
    assert len(page.all("#token-tip li")) >= 2 and "%" in page.text("#token-tip")
    spans[0].send_keys(Keys.ARROW_RIGHT)
    assert page.driver.switch_to.active_element == spans[1]
    page.one(".switch").click()
    assert not page.all(".answer .tokens") and page.text(".answer .body")


def test_escape_and_the_stop_button_end_an_answer(page: Page, fake: FakeGateway) -> None:
    stops = (lambda: page.one("#chat-form .halt").click(), lambda: page.one("body").send_keys(Keys.ESCAPE))
    for answers, stop in enumerate(stops, 1):
        fake.hung_up.clear()
        page.ask("endless")
        page.until(lambda: page.text(".answer.streaming .prose"), "the first words")
        stop()
        page.finished(answers)
        assert fake.hung_up.wait(PATIENCE_S), "the connection stayed open"
        assert page.text(".figures").count("stopped by you") == answers
    assert page.one("#chat-form .go").is_displayed()


@pytest.mark.usefixtures("motion")
def test_ring_shows_members_and_load(page: Page, fake: FakeGateway) -> None:
    assert not page.driver.execute_script("return matchMedia('(prefers-reduced-motion: reduce)').matches")
    page.until(lambda: len(page.all("#ring-loop .replica")) >= len(ROLES), "the members")
    for role in ROLES:
        assert page.all(f"[data-role={role}] .replica.ready")
    page.ask("Say hello")
    for rate in ("tokens", "requests"):
        page.until(lambda rate=rate: float(page.text(f"#rate-{rate}")) > 0, f"{rate} a second")
    # elements are made anew with each look at the ring
    page.until(lambda: page.text("[data-role=gpu_worker] .replica.starting"), "a worker that starts")
    page.until(lambda: "loading weights" in page.text("#member-rows"), "what it does")
    page.until(lambda: [one.text for one in page.all("[data-role=gpu_worker] .replica text")] == ["P", "D"], "roles")
    page.until(lambda: len(page.all("[data-role=gpu_worker] .sending")) == 1, "a sender")
    kinds = {"prefill", "decode"}
    page.until(lambda: {one.get_attribute("textContent") for one in page.all(".kv-role")} == kinds, "roles of KV")
    page.until(lambda: page.text("#kv-text") == "1,024 of 4,096", "blocks")
    page.until(lambda: len(page.all("#kv-stacks .full")) == 32, "blocks that are full")
    for down, words in ((True, "no answer"), (False, "starting")):
        fake.ring_down = down
        page.until(lambda words=words: words in page.text("#ring-state"), words)


def test_a_refused_request_is_readable_and_can_be_repeated(any_page: Page) -> None:
    page = any_page
    page.set("max_tokens", "16")
    page.set("temperature", "999")
    page.ask(QUESTION)
    page.finished()
    assert "refused" in page.text(".error strong") and "temperature" in page.text(".error")
    page.set("temperature", "1")
    page.one(".actions button").click()
    page.until(lambda: page.text(".answer .body") and not page.all(".error"), "the answer to the second try")


def test_an_error_in_mid_stream_keeps_what_came_before(page: Page, fake: FakeGateway) -> None:
    page.ask("break")
    page.finished()
    assert page.text(".answer .prose") == "Héllo <b>yard</b>"  # as text: a model's output is never markup
    assert "died twice" in page.text(".error")


def test_parameters_key_and_history_are_sent_behind_a_root_path(browser: webdriver.Chrome, fake: FakeGateway) -> None:
    page = Page(browser, fake.url + "/proxied/")
    entered = {"temperature": "0.5", "top_k": "7", "seed": "11", "stop": "\\n\\n", "system": "Be brief", "schema": "{}"}
    for name, value in entered.items():
        page.set(name, value)
    page.one("#api-key").send_keys("secret", Keys.TAB)
    page.ask("One")
    page.finished()
    page.one("#chat-input").send_keys("Two", Keys.SHIFT, Keys.ENTER, Keys.NULL, "lines", Keys.ENTER)
    page.finished(answers=2)
    sent = fake.requests[-1]
    expected = {"model": "demo", "temperature": 0.5, "top_k": 7, "seed": 11, "stop": ["\n\n"], "max_tokens": 256}
    assert {name: sent[name] for name in expected} == expected
    assert sent["structured_outputs"] == {"json": "{}"}
    assert sent["stream"] is True and sent["stream_options"] == {"include_usage": True}
    assert not {"top_p", "logprobs"} & sent.keys()
    assert [message["role"] for message in sent["messages"]] == ["system", "user", "assistant", "user"]
    assert sent["messages"][-1]["content"] == "Two\nlines"
    assert all(path.startswith("/proxied/") for path, _ in fake.seen)
    assert fake.seen.count(("/proxied/v1/chat/completions", "Bearer secret")) == 2

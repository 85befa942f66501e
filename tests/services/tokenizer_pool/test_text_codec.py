"""Text, chats and ids to token ids with block hashes, and back; invalid input is rejected with its field."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_links import FakeLinks
from text_rig import text_config
from tokenizers import Tokenizer

from blockyard.services.tokenizer_pool.chats.chat_template import ChatTemplates
from blockyard.services.tokenizer_pool.service import TokenizerPool
from blockyard.services.tokenizer_pool.text_codec import TextCodec
from blockyard.services.tokenizer_pool.workers.worker_frames import Answer, Work
from blockyard.shared.block_hashes import block_hashes, root_hash
from blockyard.shared.bus.member_list import Changed, Joined
from blockyard.shared.messages import (
    Detokenize,
    Detokenized,
    Grammar,
    GrammarEngine,
    GrammarKind,
    Member,
    ModelCard,
    Role,
    TextRejected,
    Tokenize,
    Tokenized,
)
from blockyard.shared.token_ids import pack, unpack

TEMPLATE = "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}"
TRUSTING = text_config(block_size=4, block_scope="scope", trust_request_chat_template=True)
USER = b'[{"role": "user", "content": "the fox"}]'


@pytest.fixture
def texts(byte_tokenizer: Tokenizer) -> Iterator[TextCodec]:
    templates = ChatTemplates({"default": TEMPLATE}, {"bos_token": "<s>"})
    yield TextCodec(byte_tokenizer, byte_tokenizer.get_vocab_size(), templates, TRUSTING)


def done(texts: TextCodec, **fields: Any) -> Tokenized:
    answer = texts.tokenize(Tokenize("r", "m", **fields))
    assert isinstance(answer, Tokenized), answer
    assert answer.request_id == "r"
    return answer


def rejected(texts: TextCodec, **fields: Any) -> TextRejected:
    answer = texts.tokenize(Tokenize("r", "m", **fields))
    assert isinstance(answer, TextRejected), answer
    assert answer.request_id == "r" and answer.message
    return answer


def test_the_form_of_contents_may_be_said(byte_tokenizer: Tokenizer) -> None:
    shown = "{% for m in messages %}{{ m.content }}{% endfor %}"
    parts = b'[{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]'
    size = byte_tokenizer.get_vocab_size()

    def rendered(template: str, messages: bytes, content_format: str, asked: str = "") -> str:
        templates = ChatTemplates({"default": template}, {})
        texts = TextCodec(byte_tokenizer, size, templates, text_config(chat_template_content_format=content_format))
        return done(texts, messages=messages, want_text=True, content_format=asked).text

    part = "{'type': 'text', 'text': '%s'}"
    assert rendered(shown, parts, "auto") == rendered(shown, parts, "string") == "a\nb"
    assert rendered(shown, parts, "openai") == f"[{part % 'a'}, {part % 'b'}]"
    assert rendered(shown, USER, "openai") == f"[{part % 'the fox'}]"
    assert rendered(shown, parts, "openai", asked="string") == "a\nb", "what a prompt says goes first"
    loops = "{% for m in messages %}{% for c in m.content %}<{{ c.text }}>{% endfor %}{% endfor %}"
    assert rendered(loops, parts, "auto") == "<a><b>"


def test_text(texts: TextCodec, byte_tokenizer: Tokenizer) -> None:
    answer = done(texts, text="the quick fox jumps", cache_salt="salt")
    ids = byte_tokenizer.encode("the quick fox jumps").ids
    assert unpack(answer.token_ids) == ids and ids[0] == 0
    assert answer.block_hashes == block_hashes(root_hash("scope", cache_salt="salt"), pack(ids), 4)
    assert len(answer.block_hashes) == 16 * (len(ids) // 4) > 0
    assert (answer.text, answer.pieces, answer.bad_words) == ("", [], [])
    plain = unpack(done(texts, text="the quick fox jumps", add_special_tokens=False).token_ids)
    assert plain == ids[1:]
    assert done(texts, text="the quick fox jumps").block_hashes != answer.block_hashes


def test_blocks_begin_with_virtual_tokens_and_ids_do_not(texts: TextCodec, byte_tokenizer: Tokenizer) -> None:
    answer = done(texts, text="the quick fox jumps", adapter_digest=b"digest", num_virtual_tokens=6)
    ids = byte_tokenizer.encode("the quick fox jumps").ids
    assert unpack(answer.token_ids) == ids
    assert answer.block_hashes == block_hashes(root_hash("scope", adapter=b"digest"), pack([0] * 6 + ids), 4)


def test_chat_gets_special_tokens_from_its_template_alone(texts: TextCodec, byte_tokenizer: Tokenizer) -> None:
    answer = done(texts, messages=USER, want_text=True, want_pieces=True)
    assert answer.text == "<s><|im_start|>user:the fox<|im_end|>"
    assert unpack(answer.token_ids) == byte_tokenizer.encode(answer.text, add_special_tokens=False).ids
    assert answer.pieces == [byte_tokenizer.id_to_token(i) for i in unpack(answer.token_ids)]
    assert unpack(done(texts, messages=USER, add_special_tokens=True).token_ids)[:2] == [0, 0]


def test_ids(texts: TextCodec, byte_tokenizer: Tokenizer) -> None:
    ids = byte_tokenizer.encode("the fox").ids
    answer = done(texts, token_ids=pack(ids), want_text=True)
    assert unpack(answer.token_ids) == ids
    assert answer.text == "<s>the fox"
    assert answer.block_hashes == done(texts, text="the fox").block_hashes
    bad = rejected(texts, token_ids=pack([1, texts.vocab_size]))
    assert bad.field == "prompt" and str(texts.vocab_size) in bad.message
    assert rejected(texts, token_ids=b"abc").field == "prompt"
    texts.set_model_vocab_size(texts.vocab_size + 1)
    done(texts, token_ids=pack([texts.vocab_size - 1]))


def test_ids_that_the_model_does_not_know(texts: TextCodec) -> None:
    texts.set_model_vocab_size(10)
    assert rejected(texts, text="the fox").field == "prompt"
    assert rejected(texts, messages=USER).field == "messages"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "prompt"),
        ({"text": "a", "messages": b"[]"}, "prompt"),
        ({"text": "a\ud800"}, "prompt"),
        ({"messages": b"[]"}, "messages"),
        ({"messages": b"{"}, "messages"),
        ({"messages": b"[1]"}, "messages"),
        ({"messages": b'[{"role": "\xff"}]'}, "messages"),
        ({"messages": b'[{"role": "\\ud800"}]'}, "messages"),
        ({"messages": b"[" * 100_000}, "messages"),
        ({"messages": USER, "tools": b"{}"}, "tools"),
        ({"messages": USER, "template_kwargs": b"[]"}, "chat_template_kwargs"),
        ({"messages": USER, "template_kwargs": b'{"messages": 1}'}, "chat_template_kwargs"),
        ({"messages": USER, "chat_template": "{% x %}"}, "chat_template"),
        ({"messages": USER, "chat_template": "{{ '\\ud800' }}"}, "messages"),
        ({"messages": USER, "chat_template": "{{ raise_exception('no') }}"}, "messages"),
        ({"messages": USER, "continue_final_message": True}, "continue_final_message"),
        ({"text": "a", "bad_words": ["b", " "]}, "bad_words"),
        ({"text": "a", "bad_words": ["\udfff"]}, "bad_words"),
    ],
)
def test_rejected_by_field(texts: TextCodec, fields: dict[str, Any], field: str) -> None:
    assert rejected(texts, **fields).field == field


def test_templates_of_requests_may_be_forbidden(byte_tokenizer: Tokenizer) -> None:
    templates = ChatTemplates({"default": "x"}, {})
    texts = TextCodec(byte_tokenizer, 1000, templates, text_config())
    assert rejected(texts, messages=USER, chat_template="y").field == "chat_template"


def test_bad_words_with_and_without_a_space(texts: TextCodec, byte_tokenizer: Tokenizer) -> None:
    def ids(text: str) -> list[int]:
        return list(byte_tokenizer.encode(text, add_special_tokens=False).ids)

    assert len(ids("two")) > len(ids(" two")) == 1  # the form with a space has another length: left out, as in vLLM
    assert done(texts, text="a", bad_words=["two"]).bad_words == [ids("two")]
    one = next(w for w in ("e", "t", "o", "s", "f") if len(ids(" " + w)) == len(ids(w)) == 1)
    assert done(texts, text="a", bad_words=["  " + one]).bad_words == [ids(one), ids(" " + one)]


def test_a_bad_word_that_a_space_does_not_change(word_tokenizer: Tokenizer) -> None:
    texts = TextCodec(word_tokenizer, 1000, ChatTemplates({}, {}), text_config())
    assert done(texts, text="a", bad_words=["fox"]).bad_words == [word_tokenizer.encode("fox").ids]


def test_detokenize(texts: TextCodec, byte_tokenizer: Tokenizer) -> None:
    ids = byte_tokenizer.encode("naïve 🎉").ids
    assert texts.detokenize(Detokenize("d", "m", pack(ids))) == Detokenized("d", "<s>naïve 🎉")
    assert texts.detokenize(Detokenize("d", "m", b"")) == Detokenized("d", "")
    for bad in (pack([10**6]), b"x"):
        answer = texts.detokenize(Detokenize("d", "m", bad))
        assert isinstance(answer, TextRejected) and answer.field == "tokens"


class AtOnce:
    """A text process that answers within `submit`."""

    def __init__(self, texts: TextCodec) -> None:
        self._texts = texts
        self.vocab_size = self.max_model_len = 0
        self.answered: Callable[[int, Answer], None] = lambda peer, answer: None

    def set_model(self, vocab_size: int, max_model_len: int) -> bool:
        self.vocab_size, self.max_model_len = vocab_size, max_model_len
        return True

    def submit(self, peer: int, work: Work) -> None:
        self.answered(peer, self._texts.answer(work))


class Checks:
    """Grammar checks whose verdicts the test gives."""

    def __init__(self) -> None:
        self.model: tuple[int, list[int]] | None = None
        self.works: list[tuple[int, Tokenize]] = []

    def set_model(self, vocab_size: int, eos_token_ids: list[int]) -> None:
        self.model = (vocab_size, eos_token_ids)

    def submit(self, peer: int, work: Tokenize) -> None:
        self.works.append((peer, work))


@pytest.fixture
def checks() -> Checks:
    return Checks()


@pytest.fixture
def links() -> FakeLinks:
    return FakeLinks(Member("tokenizer", Role.TOKENIZER_POOL, 1, "ipc://x"))


def test_service_answers_in_order_and_counts(links: FakeLinks, texts: TextCodec, checks: Checks) -> None:
    worker = AtOnce(texts)
    pool = TokenizerPool(links, worker, ["m"], checks)
    worker.answered = pool.on_answer
    pool.handle(5, Tokenize("a", "m", text="the fox"))
    pool.handle(6, Tokenize("b", "m"))
    pool.handle(5, Detokenize("c", "m", b""))
    assert [(to, type(frame)) for to, frame in links.answered] == [(5, Tokenized), (6, TextRejected), (5, Detokenized)]
    pool.count()
    first = links.answered[0][1]
    assert isinstance(first, Tokenized)
    assert links.me.stats.requests_total == 3
    assert links.me.stats.prompt_tokens_total == len(first.token_ids) // 4
    assert links.me.stats.rss_bytes > 0


def test_a_prompt_with_a_grammar_waits_for_its_verdict(links: FakeLinks, texts: TextCodec, checks: Checks) -> None:
    worker = AtOnce(texts)
    pool = TokenizerPool(links, worker, ["m"], checks)
    worker.answered = pool.on_answer
    grammar = Grammar(GrammarKind.REGEX, "a+")
    for name in ("taken", "refused"):
        pool.handle(5, Tokenize(name, "m", text="the fox", grammar=grammar))
    pool.handle(6, Tokenize("taken", "m", text="the dog"))  # the same id of another gateway
    assert [frame.request_id for _, frame in links.answered] == ["taken"]
    assert isinstance(plain := links.answered.pop()[1], Tokenized) and plain.grammar is None
    (_, taken), (_, refused) = checks.works
    resolved = Grammar(GrammarKind.REGEX, "a+", GrammarEngine.GUIDANCE)
    pool.on_verdict(5, refused, TextRejected("refused", "grammar", "no"))
    pool.on_verdict(5, taken, resolved)
    (to, first), (_, second) = links.answered
    assert (to, first) == (5, TextRejected("refused", "grammar", "no"))
    assert isinstance(second, Tokenized) and second.grammar == resolved and second.token_ids


def test_service_learns_the_models_vocabulary(links: FakeLinks, texts: TextCodec, checks: Checks) -> None:
    worker = AtOnce(texts)
    pool = TokenizerPool(links, worker, ["m"], checks)
    member = Member("s", Role.SCHEDULER, 9, "ipc://s")
    pool.handle(9, Joined(member))
    for name, vocab_size in (("m", 7), ("other", 3)):
        card = ModelCard([name], "", 10 * vocab_size, vocab_size, 0, [3])
        pool.handle(9, Changed(Member("s", Role.SCHEDULER, 9, "ipc://s", card=card)))
    assert (worker.vocab_size, worker.max_model_len) == (7, 70) and checks.model == (7, [3])


def test_deeply_nested_content_is_no_crash(texts: TextCodec) -> None:
    content: Any = "x"
    for _ in range(400):
        content = [content]
    assert rejected(texts, messages=json.dumps([{"role": "user", "content": content}]).encode()).field == "messages"


def test_the_id_of_an_end_within_the_grammar(texts: TextCodec) -> None:
    (inner,) = unpack(done(texts, text="<|im_end|>", add_special_tokens=False).token_ids)
    assert done(texts, text="x<|im_end|>", inner_end="<|im_end|>").inner_end == inner
    assert done(texts, text="x", inner_end="<|no_token|>").inner_end is None
    assert done(texts, text="x").inner_end is None


@pytest.mark.parametrize("text", ["hi", "a</think>b", "<think>\n", "<think>x</think>"])
@pytest.mark.parametrize("space", ["", "\n\n"])
def test_the_end_of_reasoning_is_awaited_unless_the_prompt_ends_with_it(
    texts: TextCodec, text: str, space: str
) -> None:
    answer = done(texts, text=text + space, reasoning_end="</think>")
    marker = (
        [] if text.endswith("</think>") else unpack(done(texts, text="</think>", add_special_tokens=False).token_ids)
    )
    assert answer.begin_after == marker
    cut = done(texts, token_ids=answer.token_ids, reasoning_end="</think>")  # as after truncation
    assert cut.begin_after == marker
    assert done(texts, text=text).begin_after == []


@pytest.mark.parametrize("text", ["hi", "a <think>", "a <think>\n", "<think>x</think>"])
def test_an_answer_need_not_begin_with_the_marker_that_the_prompt_ends_with(texts: TextCodec, text: str) -> None:
    answer = done(texts, text=text, reasoning_end="</think>", reasoning_start="<think>")
    marker = unpack(done(texts, text="<think>", add_special_tokens=False).token_ids)
    assert answer.only_behind == (marker if text == "hi" else [])
    assert done(texts, text=text, reasoning_end="</think>").only_behind == []


@pytest.mark.parametrize(("final", "reasons"), [("a", False), ("<think>a", True), ("<think>a</think>b", False)])
def test_a_grammar_begins_where_readers_see_the_end_of_a_continued_message(
    texts: TextCodec, final: str, reasons: bool
) -> None:
    messages = json.dumps([{"role": "user", "content": "hi"}, {"role": "assistant", "content": final}]).encode()
    answer = done(
        texts,
        messages=messages,
        add_generation_prompt=False,
        continue_final_message=True,
        reasoning_end="</think>",
        reasoning_start="<think>",
        reasoning_markers=["<think>", "</think>"],
    )
    assert answer.reasoning_opened is reasons
    assert (bool(answer.begin_after), answer.only_behind) == (reasons, [])


@pytest.mark.parametrize(
    ("text", "opened"),
    [("hi", None), ("a</think>b", None), ("x <think>", True), ("<think>x</think>", False), ("<think>x", None)],
)
@pytest.mark.parametrize("space", ["", "\n\n"])
def test_the_prompt_says_with_which_marker_of_reasoning_it_ends(
    texts: TextCodec, text: str, space: str, opened: bool | None
) -> None:
    markers = ["<think>", "</think>"]
    answer = done(texts, text=text + space, reasoning_markers=markers)
    assert answer.reasoning_opened is opened and answer.begin_after == []
    assert done(texts, token_ids=answer.token_ids, reasoning_markers=markers).reasoning_opened is opened
    assert done(texts, text=text).reasoning_opened is None
    without_start = done(texts, text=text, reasoning_markers=["", "</think>"])
    assert without_start.reasoning_opened is (False if opened is False else None)


@pytest.mark.parametrize(("text", "opened"), [("hi", False), ("<think>a", True), ("<think>a</think>b", False)])
def test_a_message_that_is_continued_may_be_inside_of_reasoning(texts: TextCodec, text: str, opened: bool) -> None:
    markers = ["<think>", "</think>"]
    answer = done(texts, text=text, reasoning_markers=markers, continue_final_message=True)
    assert answer.reasoning_opened is opened
    cut = done(texts, token_ids=answer.token_ids, reasoning_markers=markers, continue_final_message=True)
    assert cut.reasoning_opened is opened


def test_tools_and_earlier_calls_reach_the_template(byte_tokenizer: Tokenizer) -> None:
    template = (
        "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments.a }}{% endfor %}{% endfor %}"
    )
    codec = TextCodec(
        byte_tokenizer, byte_tokenizer.get_vocab_size(), ChatTemplates({"default": template}, {}), TRUSTING
    )
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": "x"}}}]
    messages = json.dumps([{"role": "assistant", "content": "", "tool_calls": calls}]).encode()
    tools = b'[{"type": "function", "function": {"name": "f"}}]'
    assert done(codec, messages=messages, tools=tools, want_text=True).text == "[f]x"
    assert done(codec, messages=messages, want_text=True).text == "x"

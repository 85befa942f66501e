"""Many texts in one frame, against each text by itself in transformers."""

from array import array

import msgspec
import pytest
from sentence_folders import WORDS, make_tokenizer

from blockyard.services.tokenizer_pool.chats.chat_template import ChatTemplates
from blockyard.services.tokenizer_pool.chats.pair_template import PairTemplate
from blockyard.services.tokenizer_pool.chats.text_template import TextTemplate
from blockyard.services.tokenizer_pool.text_batches import TextBatches
from blockyard.services.tokenizer_pool.token_chars import max_token_chars
from blockyard.shared import tokenizer_files
from blockyard.shared.config.pooling.pair_templates import QWEN3_RERANKER
from blockyard.shared.config.services.tokenizer import MessageSettings
from blockyard.shared.errors import ConfigError, RequestError
from blockyard.shared.messages import TextsTokenized, TokenizeTexts

THEIRS = make_tokenizer()
VOCAB = len(THEIRS)
TEXTS = [" ".join(WORDS[i : i + n]) for i, n in enumerate((1, 7, 30, 3))]
SECONDS = [" ".join(WORDS[50 + i : 50 + i + n]) for i, n in enumerate((9, 2, 20, 1))]


def encode(texts: list[str], *, vocab_size: int = VOCAB, template: str | None = None, **more: object) -> TextsTokenized:
    tokenizer = make_tokenizer().backend_tokenizer
    pairs = None if template is None else PairTemplate(template)
    batches = TextBatches(tokenizer, max_token_chars(tokenizer), pairs)
    request = TokenizeTexts("r", "m", texts, **more)
    found = batches.encode(request, vocab_size)
    assert found == batches.encode(request, vocab_size), "a call leaves nothing behind"
    return found


def ids_of(found: TextsTokenized) -> list[list[int]]:
    ids, lists, end = array("I", found.token_ids), [], 0
    for length in array("I", found.lengths):
        lists.append(ids[end : end + length].tolist())
        end += length
    return lists


def test_texts_and_pairs_are_those_of_transformers() -> None:
    assert ids_of(encode(TEXTS)) == THEIRS(TEXTS)["input_ids"]
    assert ids_of(encode(TEXTS, add_special_tokens=False)) == THEIRS(TEXTS, add_special_tokens=False)["input_ids"]
    found, expected = encode(TEXTS, seconds=SECONDS), THEIRS(TEXTS, SECONDS)
    assert ids_of(found) == expected["input_ids"]
    assert array("I", found.second_starts).tolist() == [types.index(1) for types in expected["token_type_ids"]]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("seconds", [[], SECONDS])
def test_truncation(seconds: list[str], side: str) -> None:
    theirs = make_tokenizer()
    theirs.truncation_side = side
    expected = theirs(TEXTS, seconds or None, truncation=True, max_length=12)["input_ids"]
    found = encode(TEXTS, seconds=seconds, max_tokens=12, truncate=True, truncates_left=side == "left")
    assert ids_of(found) == expected and not found.errors


def test_sides_with_limits_of_their_own() -> None:
    found = encode(TEXTS, seconds=SECONDS, max_first_tokens=4, max_second_tokens=6, max_tokens=13)
    cut = [" ".join(text.split()[:4]) for text in TEXTS], [" ".join(text.split()[:6]) for text in SECONDS]
    assert ids_of(found) == THEIRS(*cut)["input_ids"] and not found.errors


def test_a_text_that_is_wrong_fails_alone() -> None:
    found = encode([TEXTS[0], "aa " * 20, "\ud800", TEXTS[1]], max_tokens=12)
    assert [(error.index, error.code) for error in found.errors] == [(1, "context_length_exceeded"), (2, "")]
    assert ids_of(found) == [THEIRS(TEXTS[0])["input_ids"], [], [], THEIRS(TEXTS[1])["input_ids"]]
    (error,) = encode(TEXTS[:1], vocab_size=4).errors
    assert "outside the vocabulary of 4" in error.message


def test_the_tokens_of_a_prompt_are_counted_as_sentence_transformers_does() -> None:
    found = encode(TEXTS, prompt="aa ba ", counts_prompt=True)
    assert found.skip == 3  # [CLS] too, and [SEP] not
    assert ids_of(found) == THEIRS([f"aa ba {text}" for text in TEXTS])["input_ids"]


def test_a_prompt_goes_before_the_first_text_of_a_pair() -> None:
    """With a template it is the instruction of requests without one."""
    found = encode(TEXTS, seconds=SECONDS, prompt="aa ba ")
    assert ids_of(found) == THEIRS([f"aa ba {text}" for text in TEXTS], SECONDS)["input_ids"]
    template = "aa {{ instruction or 'ba' }} {{ query }} ca {{ document }} da"
    for instruction, shown in ((None, "fa"), ("ea", "ea")):
        found = encode(TEXTS, seconds=SECONDS, template=template, prompt="fa", instruction=instruction)
        texts = [f"aa {shown} {query} ca {document} da" for query, document in zip(TEXTS, SECONDS, strict=True)]
        assert ids_of(found) == THEIRS(texts, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("special", [True, False])
def test_the_prompt_before_a_text_stays_if_the_beginning_is_cut(special: bool) -> None:
    more = {"prompt": "aa ba ", "counts_prompt": True, "truncates_left": True, "add_special_tokens": special}
    found = encode(TEXTS, max_tokens=12, truncate=True, **more)
    room = 12 - 2 - 2 * special
    kept = [f"aa ba {' '.join(text.split()[-room:])}" for text in TEXTS]
    assert ids_of(found) == THEIRS(kept, add_special_tokens=special)["input_ids"] and not found.errors
    assert found.skip == 2 + special
    [error] = encode(TEXTS[2:3], max_tokens=2, truncate=True, **more | {"add_special_tokens": True}).errors
    assert error.message.startswith("The text cannot be cut to 2 tokens")


def test_the_prompt_before_a_pair_stays_if_beginnings_are_cut() -> None:
    """The longer text is cut first, as transformers does without a prompt."""
    theirs = make_tokenizer()
    theirs.truncation_side = "left"
    more = {"seconds": SECONDS, "prompt": "aa ba ", "truncates_left": True, "max_tokens": 14, "truncate": True}
    expected = theirs(TEXTS, SECONDS, truncation=True, max_length=12)["input_ids"]
    prompt = THEIRS("aa ba", add_special_tokens=False)["input_ids"]
    assert ids_of(encode(TEXTS, **more)) == [[ids[0], *prompt, *ids[1:]] for ids in expected]


@pytest.mark.parametrize("left", [False, True])
def test_limits_of_texts_do_not_count_the_prompt(left: bool) -> None:
    more = {"max_first_tokens": 4, "max_second_tokens": 3, "truncates_left": left, "max_tokens": 12, "truncate": True}
    side = slice(-4, None) if left else slice(4)
    firsts = [f"aa ba {' '.join(text.split()[side])}" for text in TEXTS]
    seconds = [" ".join(text.split()[-3:] if left else text.split()[:3]) for text in SECONDS]
    assert ids_of(encode(TEXTS, seconds=SECONDS, prompt="aa ba ", **more)) == THEIRS(firsts, seconds)["input_ids"]


def test_characters_of_several_tokens_behind_a_prompt_are_cut() -> None:
    tokenizer = tokenizer_files.load("shared/demo_model").tokenizer
    batches = TextBatches(tokenizer, None)
    texts = ["\U0001f6a4 lock " * 9, "\u4f60\u597d\u4e16\u754c" * 9, "naïve " * 20, "  " * 30]
    request = TokenizeTexts("r", "m", texts, truncate=True, truncates_left=True, prompt="query: ")
    start = tokenizer.encode("query:").ids
    for most in range(12, 30):
        found = batches.encode(msgspec.structs.replace(request, max_tokens=most), tokenizer.get_vocab_size())
        assert not found.errors and max(array("I", found.lengths)) <= most
        assert all(ids[: len(start)] == start for ids in ids_of(found))


def test_a_template_of_pairs() -> None:
    template = "aa {{ instruction or 'ba' }} {{ query }} ca {{ document }} da"
    found = encode(TEXTS, seconds=SECONDS, template=template, instruction="ea")
    texts = [f"aa ea {query} ca {document} da" for query, document in zip(TEXTS, SECONDS, strict=True)]
    assert ids_of(found) == THEIRS(texts, add_special_tokens=False)["input_ids"]
    cut = encode([TEXTS[1]], seconds=[SECONDS[2]], template=template, max_tokens=15, truncate=True)
    kept = " ".join(SECONDS[2].split()[:4])  # the document is cut, and not what is behind it
    assert ids_of(cut) == THEIRS([f"aa ba {TEXTS[1]} ca {kept} da"], add_special_tokens=False)["input_ids"]
    with pytest.raises(RequestError, match="no template of pairs"):
        encode(TEXTS, instruction="ea")
    with pytest.raises(ConfigError, match="line 1"):
        PairTemplate("{{ query")
    of_chats = "{% for one in messages if one.role in ('user', 'system') %}{{ one.content }}{% endfor %}"
    for source, name in ((of_chats, "query"), ("{{ query }}", "document")):
        with pytest.raises(ConfigError, match=f"does not show the {name}"):
            PairTemplate(source)
    PairTemplate("{% if not instruction %}{{ raise_exception('no instruction') }}{% endif %}{{ query }} {{ document }}")


@pytest.mark.parametrize(("left", "kept"), [(False, slice(4)), (True, slice(-4, None))])
def test_the_side_of_a_document_that_is_cut(left: bool, kept: slice) -> None:
    """Of one before a template as of one in a template."""
    template, texts = "aa {{ query }} ca {{ document }} da", {"seconds": [SECONDS[2]], "truncates_left": left}
    shown = " ".join(SECONDS[2].split()[kept])
    expected = THEIRS([f"aa {TEXTS[1]} ca {shown} da"], add_special_tokens=False)["input_ids"]
    for limits in ({"max_tokens": 14, "truncate": True}, {"max_second_tokens": 4}):
        assert ids_of(encode([TEXTS[1]], template=template, **texts, **limits)) == expected


@pytest.mark.parametrize("left", [False, True])
def test_a_document_of_characters_of_several_tokens_is_cut(left: bool) -> None:
    """Where the cut is within one, it goes, too. What cannot be cut at all is an error."""
    tokenizer = tokenizer_files.load("shared/demo_model").tokenizer
    batches = TextBatches(tokenizer, None, PairTemplate("Q: {{ query }} D: {{ document }}!"))
    documents = ["\U0001f6a4 lock " * 9, "\u4f60\u597d\u4e16\u754c" * 9, "naïve " * 20, "  " * 30]
    request = TokenizeTexts("r", "m", ["x"] * 4, documents, truncate=True, truncates_left=left)
    for most in range(20, 40):
        found = batches.encode(msgspec.structs.replace(request, max_tokens=most), tokenizer.get_vocab_size())
        assert not found.errors and max(array("I", found.lengths)) <= most
    assert len(batches.encode(msgspec.structs.replace(request, max_tokens=2), 10**6).errors) == 4


def test_a_template_of_pairs_with_messages() -> None:
    """Its values are those of transformers: no generation prompt, and the special tokens; others are the folder's."""
    template = (
        "{{ bos_token }} {% for one in messages %}{{ one.content }} {% endfor %}"
        "{% if add_generation_prompt %}da{% endif %}{{ more }}"
    )
    assert PairTemplate(template, {"bos_token": "ga"}).render("q", "d", "i") == "ga i q d "
    settings = MessageSettings(values={"add_generation_prompt": True, "more": "!"})
    assert PairTemplate(template, {}, settings).render("q", "d", None) == " q d da!"
    parts = "{{ messages[0].content[0].text }} {{ messages[1].content[0].text }}"
    assert PairTemplate(parts, {}, MessageSettings(has_parts=True)).render("q", "d", None) == "q d"


@pytest.mark.parametrize("prompt", ["", "ga ha"])
def test_texts_that_the_chat_template_writes(prompt: str) -> None:
    each = "{% for one in messages %}{{ one.role }} {{ one.content }} ea {% endfor %}"
    chats = each + "{% if add_generation_prompt %}aa{% endif %}"
    written = TextTemplate(ChatTemplates({"default": chats}, {}), MessageSettings(writes_texts=True))
    tokenizer = make_tokenizer().backend_tokenizer
    batches = TextBatches(tokenizer, max_token_chars(tokenizer), None, written)
    before = f"system {prompt} ea " if prompt else ""
    request = TokenizeTexts("r", "m", TEXTS, prompt=prompt, counts_prompt=True)
    found = batches.encode(request, VOCAB)
    expected = [f"{before}user {text} ea" for text in TEXTS]
    assert ids_of(found) == THEIRS(expected, add_special_tokens=False)["input_ids"] and found.skip == 0
    length = len(THEIRS(expected[2], add_special_tokens=False)["input_ids"])
    for left, kept in ((False, slice(20)), (True, slice(-20, None))):
        cut = msgspec.structs.replace(request, max_tokens=length - 10, truncate=True, truncates_left=left)
        shown = " ".join(TEXTS[2].split()[kept])
        [ids] = ids_of(batches.encode(msgspec.structs.replace(cut, texts=[TEXTS[2]]), VOCAB))
        assert ids == THEIRS(f"{before}user {shown} ea", add_special_tokens=False)["input_ids"]


def test_of_a_pair_that_is_too_long_the_longer_text_is_named() -> None:
    errors = encode(TEXTS, seconds=SECONDS, max_tokens=12).errors
    assert [(one.index, one.is_second, one.num_tokens) for one in errors] == [(0, True, 13), (2, False, 53)]


def test_what_is_around_a_text_may_be_too_long() -> None:
    """The error does not say to cut what is cut already."""
    template = "aa {{ query }} ca {{ document }} da"
    for more in ({}, {"seconds": SECONDS[:1]}, {"seconds": SECONDS[:1], "template": template}):
        [error] = encode([TEXTS[2]] if "template" in more else TEXTS[:1], max_tokens=1, truncate=True, **more).errors
        assert error.message.startswith("The text cannot be cut to 1 tokens") and error.max_tokens == 1


def test_the_template_of_qwen3_reranker() -> None:
    text = PairTemplate(QWEN3_RERANKER).render("q", "d", None)
    assert text.startswith("<|im_start|>system\nJudge whether") and text.endswith("<think>\n\n</think>\n\n")
    assert "<Instruct>: Given a web search query" in text and "\n<Query>: q\n<Document>: d<|im_end|>\n" in text

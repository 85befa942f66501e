"""Prompts with a hole: the ids of a text before and a text behind it, between the markers of the model's family.

A template is a text with `{prefix}` and `{suffix}` once each; the text around them is markers. Source of the families:
the model cards of Qwen2.5-Coder, StarCoder2, Granite Code, CodeGemma, DeepSeek-Coder, CodeLlama and Codestral.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

from tokenizers import Tokenizer

from blockyard.shared.errors import ConfigError, RequestError

PREFIX, SUFFIX = "{prefix}", "{suffix}"
SUFFIX_SHARE = 4  # of a prompt that does not fit, a suffix gets a fourth, or more where the prefix leaves it

Encode = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class Family:
    """template: its markers are single tokens, by which a tokenizer of the family is known. ends: tokens that end the
    answer, of those that the tokenizer has; each marker is one, too."""

    template: str
    ends: tuple[str, ...] = ()


FAMILIES = (
    Family(  # Qwen Coder, CodeGemma, Granite 4
        "<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>",
        ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>", "<|endoftext|>", "<|end_of_text|>"),
    ),
    Family(  # StarCoder, Granite Code
        "<fim_prefix>{prefix}<fim_suffix>{suffix}<fim_middle>",
        ("<fim_pad>", "<repo_name>", "<reponame>", "<file_sep>", "<filename>", "<|endoftext|>"),
    ),
    Family("<fim-prefix>{prefix}<fim-suffix>{suffix}<fim-middle>", ("<fim-pad>", "<|endoftext|>")),  # SantaCoder
    Family("<｜fim▁begin｜>{prefix}<｜fim▁hole｜>{suffix}<｜fim▁end｜>", ("<｜end▁of▁sentence｜>",)),  # DeepSeek
    Family("▁<PRE>{prefix}▁<SUF>{suffix}▁<MID>", ("▁<EOT>",)),  # CodeLlama
    Family("[SUFFIX]{suffix}[PREFIX]{prefix}"),  # Codestral
)


@dataclass(frozen=True, slots=True)
class _Markers:
    """Ids of the markers before, between and behind the two texts."""

    before: list[int]
    between: list[int]
    behind: list[int]
    suffix_first: bool
    ends: list[int]


class FillInMiddle:
    """The markers of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, template: str | None = None) -> None:
        """template: --fim-template; None: that of the first family whose markers the tokenizer has.

        Raises ConfigError for a template without both places.
        """
        self._markers: _Markers | None = None
        if template is not None:
            self._markers = _own_markers(tokenizer, template)
            return
        for family in FAMILIES:
            ids = [_vocabulary_ids(tokenizer, text) for text in _texts(family.template)]
            if all(one is not None for one in ids):
                marks = [one or [] for one in ids]
                ends = [i for i in map(tokenizer.token_to_id, family.ends) if i is not None]
                self._markers = _markers(family.template, marks, [*ends, *chain.from_iterable(marks)])
                return

    @property
    def ends(self) -> list[int]:
        """Ids of tokens that end the answer."""
        return self._markers.ends if self._markers is not None else []

    def prompt(
        self, prefix: str, suffix: str, start: Sequence[int], encode: Encode, most: int = 0, most_chars: int = 0
    ) -> list[int]:
        """The ids of a prompt, of at most `most` tokens (0: no limit). Longer texts keep the part next to the hole.

        start: ids before all others. most_chars: of a token; 0: unknown, and all of a text is encoded.
        Raises RequestError if the model has no markers, or if they alone do not fit.
        """
        marks = self._markers
        if marks is None:
            raise RequestError(
                "this model's tokenizer has no markers of a known family for the text behind a hole; --fim-template of "
                "the server sets them",
                "suffix",
            )
        room = most - len(start) - len(marks.before) - len(marks.between) - len(marks.behind)
        if most and room < 1:
            raise RequestError(
                f"{most} tokens are left for the prompt, too few for a hole with text around it",
                "suffix",
                code="context_length_exceeded",
            )
        if most and most_chars:
            prefix, suffix = prefix[-room * most_chars :], suffix[: room * most_chars]
        before, behind = encode(prefix) if prefix else [], encode(suffix) if suffix else []
        if most and len(before) + len(behind) > room:
            kept = min(len(behind), max(room // SUFFIX_SHARE, room - len(before)))
            before, behind = before[len(before) - (room - kept) :], behind[:kept]
        first, second = (behind, before) if marks.suffix_first else (before, behind)
        return [*start, *marks.before, *first, *marks.between, *second, *marks.behind]


def _texts(template: str) -> list[str]:
    """The texts of a template around its two places."""
    first, second = sorted((PREFIX, SUFFIX), key=template.index)
    before, rest = template.split(first)
    return [before, *rest.split(second)]


def _markers(template: str, ids: list[list[int]], ends: list[int]) -> _Markers:
    before, between, behind = ids
    return _Markers(before, between, behind, template.index(SUFFIX) < template.index(PREFIX), sorted(set(ends)))


def _vocabulary_ids(tokenizer: Tokenizer, text: str) -> list[int] | None:
    """The id of a marker that is one token; None: the tokenizer does not have it."""
    if not text:
        return []
    found = tokenizer.token_to_id(text)
    return None if found is None else [found]


def _own_markers(tokenizer: Tokenizer, template: str) -> _Markers:
    if template.count(PREFIX) != 1 or template.count(SUFFIX) != 1:
        raise ConfigError(f"--fim-template needs {PREFIX} and {SUFFIX}, once each; got {template!r}")
    ids = [
        _vocabulary_ids(tokenizer, text) or tokenizer.encode(text, add_special_tokens=False).ids if text else []
        for text in _texts(template)
    ]
    return _markers(template, ids, [one[0] for one in ids if len(one) == 1])

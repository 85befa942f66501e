"""Leaves out the beginning of a call in which an answer ends: by its limit of tokens, a stop string, or of itself.

At the end of an answer, text is still held back that might have become a call. It is no content if it has a whole
opening of a call, if it stands directly behind a call, or if the answer is calls and nothing else. Other text is
content: it only might have become an opening.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from blockyard.shared.output_parsing.parts import Part, PartKind

CUT_CHARACTER = "\ufffd"  # as the detokenizer writes bytes that are no whole character
ENDS_OF_CALLS = (PartKind.CALL, PartKind.CALL_END)
CALL_KINDS = (PartKind.CALL, PartKind.ARGUMENTS, PartKind.CALL_END)


@dataclass(frozen=True, slots=True)
class CutCalls:
    """Tells the beginning of a call from content, in the answers to one request.

    `openings` are compared without whitespace. `only_calls`: a grammar allows no content. `text_is_call`: the end of
    the text ends the call, as that of a custom tool whose answer is its text.
    """

    openings: tuple[str, ...] = ()
    only_calls: bool = False
    text_is_call: bool = False

    @classmethod
    def of(cls, openings: Sequence[str], only_calls: bool, text_is_call: bool) -> "CutCalls":
        return cls(tuple(_dense(one) for one in openings), only_calls, text_is_call)

    def without_cut_character(self, text: str) -> tuple[str, str]:
        """The last text of an answer, and what stands for a character in which it ends, perhaps one of a marker."""
        whole = text if self.text_is_call else text.rstrip(CUT_CHARACTER)
        return whole, text[len(whole) :]

    def left_out(self, rest: list[Part], last: PartKind | None, cut_character: str = "") -> list[Part]:
        """Without the beginning of a call, and without the end of a call that is not whole.

        `rest` are the parts that were held back up to the end of the text, `last` is the kind of the part before them.
        `cut_character` stands for a character that the text ends in: it belongs to the text before it.
        """
        shown: list[Part] = []
        for at, part in enumerate(rest):
            if part.kind == PartKind.CONTENT and self._begins_call(rest, at, last):
                return shown
            if part.kind == PartKind.CALL_END and not self.text_is_call and not _is_whole(rest[:at]):
                continue
            shown.append(part)
            last = part.kind
        if not cut_character or last in ENDS_OF_CALLS or (self.only_calls and last in (None, PartKind.CONTENT)):
            return shown
        return [*shown, Part(PartKind.CONTENT if last is None else last, cut_character)]

    def _begins_call(self, rest: list[Part], at: int, last: PartKind | None) -> bool:
        if any(part.kind != PartKind.CALL_END for part in rest[at + 1 :]):
            return False
        if self.only_calls or last in CALL_KINDS:
            return True
        text = _dense(rest[at].text)
        return any(opening in text for opening in self.openings)


def _is_whole(before: list[Part]) -> bool:
    """Whether the arguments of a call that ends with the text are an object which was held back as a whole."""
    if not before or before[-1].kind != PartKind.ARGUMENTS or not before[-1].text.startswith("{"):
        return False
    try:
        msgspec.json.decode(before[-1].text, type=dict)
    except msgspec.DecodeError:
        return False
    return True


def _dense(text: str) -> str:
    return "".join(text.split())

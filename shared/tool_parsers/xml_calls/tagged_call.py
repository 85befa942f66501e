"""Reads and forces calls in tags: <function=get_weather><parameter=city>Paris</parameter></function>."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from blockyard.shared.output_parsing.json_text import MAX_NAME_CHARS, escaped
from blockyard.shared.output_parsing.markers import Markers
from blockyard.shared.output_parsing.parts import CALL_END, Part, PartKind, Reading
from blockyard.shared.output_parsing.text_input import SPACES, TextInput
from blockyard.shared.tool_parsers.grammar_rules import GrammarRules, any_of, arguments_schema
from blockyard.shared.tool_parsers.schema_types import NOT_STRINGS, parameter_types
from blockyard.shared.tool_parsers.tools import Tool
from blockyard.shared.tool_parsers.xml_calls.argument_rules import ArgumentRules, NamedArgument
from blockyard.shared.tool_parsers.xml_calls.parameters import ValueText


@dataclass(frozen=True, slots=True)
class TaggedCall:
    """The tags of a call, which may have whitespace between them.

    A tool's name stands between `start` and `name_end`; an empty `name_end` means that it ends with its line or before
    a tag. An argument's name stands between `key` and `key_end`, its value between `value` and `value_end`, with
    `padding` on either side of the value where the format has it. Strings that look like tags or have several lines
    stand between `quotes` there, if the format has them. `says_string`: an attribute `string="true"` or
    `"false"` behind an argument's name says whether the value is a string. `special`: special tokens, which are tags or
    parts of tags.
    """

    start: str
    name_end: str
    end: str
    key: str
    key_end: str
    value_end: str
    value: str = ""
    padding: str = ""
    quotes: tuple[str, str] = ("", "")
    says_string: bool = False
    special: tuple[str, ...] = ()
    line_break: str = "\n"  # between tags, as the template writes it
    outer_end: str = ""  # may stand behind `end`

    def read(self, text: TextInput, tools: Sequence[Tool], known: bool = False) -> Reading[bool]:
        """Reads the call that follows, of a `known` tool only or of any.

        False, with nothing read, if its name or what follows the name is malformed.
        """
        place = text.keep()
        yield from text.spaces()
        name = (yield from self._name(text)) if not self.start or (yield from text.literal(self.start)) else ""
        yield from text.spaces()
        tool = next((tool for tool in tools if tool.name == name), None)
        is_call = bool(name) and (tool is not None or not known)
        if not is_call or not (yield from text.next_marker(Markers(self.key, self.end))):
            text.rewind(place)
            return False
        text.release()
        yield Part(PartKind.CALL, name)
        yield from self._arguments(text, arguments_schema(tool) if tool is not None else {})
        yield CALL_END
        return True

    def _name(self, text: TextInput) -> Reading[str]:
        ends = Markers(self.name_end) if self.name_end else Markers("\n", self.key, self.end)
        found = yield from text.before(ends, MAX_NAME_CHARS, _may_be_name)
        if found is None:
            return ""
        if self.name_end:
            yield from text.literal(self.name_end)
        return found.strip(SPACES)

    def _arguments(self, text: TextInput, schema: dict[str, Any]) -> Reading[None]:
        """The object stays open if the answer ends before the call does."""
        properties = schema.get("properties")
        unseen = set(properties) if isinstance(properties, dict) and properties else None

        def is_missing(text: TextInput, mark: str) -> Reading[bool]:
            return self._value_end_is_missing(text, mark, unseen)

        later = [one for one in (self.key, self.end, self.outer_end) if one]
        values, before = ValueText(self.value_end, self.padding, later, is_missing), "{"
        start, end = self.quotes
        in_key = False  # the text ends in the tag before a value
        while True:
            place = text.keep()
            yield from text.spaces()
            head = yield from self._key(text, schema)
            if head is None:
                in_key = text.rewind(place)
                break
            text.release()
            key, types = head
            if unseen is not None:
                unseen.discard(key)
            yield Part(PartKind.ARGUMENTS, f'{before}"{escaped(key)}": ')
            before = ", "
            quoted = bool(start) and (yield from text.literal(start))
            if not (yield from (ValueText(end + self.value_end) if quoted else values).read(text, types)):
                return
        if not (yield from self._is_cut(text)) and not in_key:
            yield Part(PartKind.ARGUMENTS, "{}" if before == "{" else "}")

    def _key(self, text: TextInput, schema: dict[str, Any]) -> Reading[tuple[str, frozenset[str]] | None]:
        """Reads up to a value. Returns the argument's name and the types of its values."""
        if not (yield from text.literal(self.key)):
            return None
        key = yield from text.before(Markers(*filter(None, (self.key_end, self.value))), MAX_NAME_CHARS)
        if key is None:
            return None
        yield from text.literal(self.key_end)
        types = parameter_types(schema, key)
        if self.says_string:
            says = yield from text.one_of(Markers(' string="true">', ' string="false">', ">"))
            if not says:
                return None
            if says != ">":
                types = frozenset({"string"}) if "true" in says else (types & NOT_STRINGS or NOT_STRINGS)
        if self.value:
            yield from text.spaces()
            if not (yield from text.literal(self.value)):
                return None
        return key, types

    def _value_end_is_missing(self, text: TextInput, mark: str, unseen: Collection[str] | None) -> Reading[bool]:
        """Whether the value that is read ends without its closing tag before the tag `mark`, which follows.

        It does if all closing tags behind it are of other arguments. A tag in a value is text, and has to look like one
        that may follow: an argument still `unseen` (None: any), or the end of the call before text that follows calls.
        """
        place = text.keep()
        text.skip(len(mark))
        if mark == self.key:
            name = yield from text.before(Markers(self.key_end), MAX_NAME_CHARS, _may_be_name)
            may_follow = bool(name) and (unseen is None or name in unseen)
        else:
            yield from text.spaces()
            behind = Markers(*filter(None, (self.start, self.outer_end)))
            may_follow = mark != self.end or mark in self.special or bool((yield from text.next_marker(behind)))
            may_follow = may_follow or not (yield from text.peek())
        depth, tags = int(mark == self.key), Markers(self.key, self.value_end)
        while may_follow and (found := (yield from text.past(tags))):
            depth += 1 if found == self.key else -1
            may_follow = depth >= 0
        text.rewind(place)
        return may_follow

    def _is_cut(self, text: TextInput) -> Reading[bool]:
        """Reads the end of the call. True if instead the text ends, perhaps in a tag, which is then read."""
        place = text.keep()
        yield from text.spaces()
        if (yield from text.literal(self.end)):
            text.release()
            return False
        rest = yield from text.peek(max(len(self.end), len(self.key)) + 1)
        is_cut = self.end.startswith(rest) or self.key.startswith(rest)
        if is_cut:
            text.skip(len(rest))
            text.release()
        else:
            text.rewind(place)
        return is_cut

    def write_grammar(self, rules: GrammarRules, tool: Tool) -> str:
        """An expression for a call of this tool as templates write it. Raises RequestError."""
        arguments = ArgumentRules(rules, arguments_schema(tool), tool.name, self.says_string)
        head = self.opening(rules, self.start + tool.name + self.name_end + self.line_break)
        body = arguments.in_order(lambda argument: self._argument(rules, arguments, argument))
        return f"{head} {body} {self.tags(rules, self.end)}"

    def _argument(self, rules: GrammarRules, arguments: ArgumentRules, argument: NamedArgument) -> str | None:
        """The expression for one argument up to the next. None if its name or no value can be written."""
        if self.key_end in argument.name or len(argument.name) > MAX_NAME_CHARS:
            return None
        text, others = arguments.values(argument)
        special = next((one for one in self.special if one in self.value_end), "")
        choices = []
        if text is not None and self.quotes[0]:
            start, end = self.quotes
            choices.append(rules.until(f"({text} & /[^<&\\n]*/)", self.value_end, special))
            choices.append(f"{rules.text(start)} {rules.until(text, end + self.value_end, special)}")
        elif text is not None:
            says = rules.text(' string="true">') if self.says_string else ""
            choices.append(f"{says} {rules.until(text, self.padding + self.value_end, special)}")
        if others is not None:
            says = rules.text(' string="false">') if self.says_string else ""
            choices.append(f"{says} {others} {self.tags(rules, self.padding + self.value_end)}")
        if not choices:
            return None
        return rules.rule(f"{self._key_rule(rules, argument)} {any_of(choices)} {self.tags(rules, self.line_break)}")

    def _key_rule(self, rules: GrammarRules, argument: NamedArgument) -> str:
        before_value = self.key_end + (self.line_break + self.value if self.value else "") + self.padding
        if argument.name_term is None:
            return self.tags(rules, self.key + argument.name + before_value)
        head, name = self.key, argument.name_term
        for one in self.special:  # a name is read with the text before it, as far as that is no token
            head = head.rpartition(one)[2]
        before = self.key.removesuffix(head)
        name = rules.terminal(f"{rules.text(head)} {name}" if head else name)
        return f"{self.tags(rules, before)} {name} {self.tags(rules, before_value)}"

    def opening(self, rules: GrammarRules, text: str) -> str:
        """This text behind any other text, which is read as far as it goes: in one piece where no token stops it."""
        written, plain = self.tags(rules, text), rules.text(text)
        return written if written == plain or text.startswith(self.special) else f"({written} | {plain})"

    def tags(self, rules: GrammarRules, text: str) -> str:
        """This text, in which special tokens are markers."""
        written: list[str] = []
        while text:
            found = Markers(*self.special).find(text) if self.special else None
            at, token = found if found is not None else (len(text), "")
            written += [rules.text(text[:at])] if at else []
            written += [rules.marker(token)] if token else []
            text = text[at + len(token) :]
        return " ".join(written)


def _may_be_name(text: str) -> bool:
    return not any(char in SPACES or char in "<>" for char in text.strip(SPACES))


@dataclass(frozen=True, slots=True)
class TaggedCalls:
    """How an answer has its calls: each or all between `start` and `end`, or without these if they are empty.

    `bare`: calls of known tools may stand without `start`, which models leave out.
    """

    call: TaggedCall
    start: str = ""
    end: str = ""
    bare: bool = False
    all_together: bool = False
    between: str = "\n"  # calls, as the template writes it

    @property
    def starts(self) -> tuple[str, ...]:
        """The texts with one of which calls begin."""
        return tuple(one for one in (self.start, self.call.start if self.bare or not self.start else "") if one)

    def read(self, text: TextInput, tools: Sequence[Tool]) -> Reading[None]:
        openings = Markers(*self.starts)
        while found := (yield from text.until(PartKind.CONTENT, openings)):
            yield from self.read_opened(text, tools, found)

    def read_opened(self, text: TextInput, tools: Sequence[Tool], found: str) -> Reading[None]:
        """Reads the calls behind one of `starts`, which was just read. It is content if no call follows."""
        is_bare = found != self.start
        if is_bare:
            text.back(len(found))
        if not (yield from self.call.read(text, tools, known=is_bare and bool(self.start))):
            if is_bare:
                text.skip(len(found))
            end = self.end if not is_bare else "" if self.start else self.call.end
            if end and (yield from text.spaced_literal(end)):  # the model calls no tool
                yield from text.spaces()
            else:
                yield Part(PartKind.CONTENT, found)
            return
        while not is_bare and (yield from self.call.read(text, tools)):
            pass
        yield from text.spaces()
        if self.end and (yield from text.literal(self.end)):
            yield from text.spaces()

    def write_grammar(self, rules: GrammarRules, tools: Sequence[Tool], parallel: bool) -> str:
        """Raises RequestError."""
        calls = any_of([self.call.write_grammar(rules, tool) for tool in tools])
        start = self.call.opening(rules, self.start + self.between) if self.start else ""
        end = self.call.tags(rules, self.between + self.end) if self.end else ""
        between = self.call.tags(rules, self.between)
        if self.all_together:
            return f"{start} {rules.repeated(calls, parallel, between)} {end}"
        return rules.repeated(f"{start} {calls} {end}", parallel, between)

"""A small instruction set made from the standard library: a request for a function is answered with its source.

Questions are templates of ours, answers are the library's own code and docstrings; a few lines of small talk are ours
altogether. Everything is drawn from a seeded generator, so the same corpus gives the same examples.
"""

import random
from dataclasses import dataclass

from jinja2.sandbox import ImmutableSandboxedEnvironment

from demo_training.corpus import SourceFile
from demo_training.definitions import Definition, definitions
from demo_training.train_tokenizer import BOS, CHAT_TEMPLATE

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant that writes Python.",
    "You are a Python programmer. Answer with code.",
)
VERB_LIST = (
    "add append apply assert build calculate call check clear close compare compile compute convert copy count "
    "create decode decorate delete determine disable display emit enable encode ensure execute extract fetch find "
    "flush format generate get handle initialize insert install iterate join list load locate look make map mark "
    "match merge move normalize open parse perform pop prepare print process produce provide push put raise read "
    "receive register remove rename replace report reset resolve retrieve return reverse run search select send "
    "set show skip sort split start stop store strip take test transform translate try turn update use validate "
    "verify wait walk write yield "
)
VERBS = frozenset(VERB_LIST.split())
# Half of all definitions are unit tests; this many of them are asked for.
TEST_SHARE = 0.4
SMALL_TALK_SHARE = 0.04
GREETINGS = (
    "Hi",
    "Hello",
    "Hello!",
    "Hey",
    "Hi there",
    "hi",
    "hello",
    "Good morning",
    "Hi, how are you?",
    "Hey there!",
)
GREETING_REPLIES = ("Hello! Ask me for a Python function.", "Hi! What shall I write in Python?")
WHO = (
    "Who are you?",
    "What are you?",
    "What is this?",
    "What model are you?",
    "Tell me about yourself.",
    "who are you",
)
WHO_REPLY = (
    "I am Blockyard's demo model, a very small language model trained on the source code of Python's standard library. "
    "I can write things that look like Python."
)
CAN = ("What can you do?", "Help", "help", "How can you help me?", "What should I ask you?", "What do you know?")
CAN_REPLY = (
    "I complete Python code and write small functions, classes and unit tests. "
    "Try: Write a function that returns the number of lines in a file."
)
THANKS = ("Thanks", "Thank you!", "thanks", "Great, thanks", "Bye", "Goodbye")
THANKS_REPLY = "You are welcome!"


@dataclass(frozen=True, slots=True)
class Turn:
    question: str
    answer: str


def fenced(code: str) -> str:
    return f"```python\n{code}```"


def as_task(summary: str) -> str | None:
    """ "Return the name." -> "returns the name"; None when the summary does not begin with a verb we know."""
    first, _, rest = summary.rstrip(".").partition(" ")
    verb = first.lower()
    singular = verb.removesuffix("s")
    if singular not in VERBS and verb not in VERBS:
        return None
    if verb in VERBS:
        if verb.endswith(("ch", "sh", "ss", "x")):
            verb += "es"
        elif verb.endswith("y") and verb[-2] not in "aeiou":
            verb = verb[:-1] + "ies"
        else:
            verb += "s"
    return f"{verb} {rest}" if rest else None


def write_turn(found: Definition, rng: random.Random) -> Turn | None:
    kind = "class" if found.is_class else "function"
    if found.name.startswith("test"):
        words = found.name.removeprefix("test").strip("_").replace("_", " ")
        asks = [f"Write a unit test named `{found.name}`."]
        if words:
            asks += [f"Write a unit test for {words}.", f"Write a test for {words}."]
        return Turn(rng.choice(asks), fenced(found.source))
    if not found.summary or len(found.summary) > 160:
        return None
    asks = [f"Write a {kind} `{found.signature}`: {found.summary}", f"Implement `{found.signature}`.\n{found.summary}"]
    task = as_task(found.summary)
    if task is not None:
        asks += [f"Write a {kind} that {task}.", f"write a python {kind} that {task}", f"Write a {kind} that {task}"]
    return Turn(rng.choice(asks), fenced(found.source))


def explain_turn(found: Definition, rng: random.Random) -> Turn | None:
    if not 20 <= len(found.doc) <= 800:
        return None
    full = f"{found.module}.{found.name}"
    asks = [f"What does `{full}` do?", f"Explain `{full}`.", f"What is `{full}`?", f"What does {full} do?"]
    if found.bare_source:
        asks += [f"What does this code do?\n{fenced(found.bare_source)}"] * 2
    return Turn(rng.choice(asks), found.doc)


def complete_turn(found: Definition, rng: random.Random) -> Turn | None:
    lines = found.source.splitlines(keepends=True)
    if len(lines) < 4:
        return None
    start = "".join(lines[: rng.randint(1, len(lines) // 2)])
    ask = rng.choice(("Complete this code:", "Complete this function:", "Finish this code:", "Continue:"))
    return Turn(f"{ask}\n{fenced(start)}", fenced(found.source))


def docstring_turn(found: Definition, rng: random.Random) -> Turn | None:
    if not found.bare_source or len(found.doc) > 600:
        return None
    ask = rng.choice(("Write a docstring for this code:", "Document this code:", "Write the docstring."))
    return Turn(f"{ask}\n{fenced(found.bare_source)}", f'"""{found.doc}"""')


OTHER_MAKERS = (explain_turn, complete_turn, docstring_turn)


def turns_about(found: Definition, rng: random.Random) -> list[Turn]:
    """Up to two: the definition asked for, and one other question about it."""
    if found.name.startswith("test"):
        maker = write_turn if rng.random() < 0.7 else complete_turn
        made = [maker(found, rng)] if rng.random() < TEST_SHARE else []
    else:
        made = [write_turn(found, rng), rng.choice(OTHER_MAKERS)(found, rng)]
    return [turn for turn in made if turn is not None]


def small_talk(rng: random.Random) -> Turn:
    asks, reply = rng.choice(
        (
            (GREETINGS, rng.choice(GREETING_REPLIES)),
            (GREETINGS, rng.choice(GREETING_REPLIES)),
            (WHO, WHO_REPLY),
            (CAN, CAN_REPLY),
            (THANKS, THANKS_REPLY),
        )
    )
    return Turn(rng.choice(asks), reply)


def turns(files: list[SourceFile], seed: int) -> list[Turn]:
    """Shuffled, with the small talk in between."""
    rng = random.Random(seed)
    found = [definition for file in files for definition in definitions(file.path, file.text)]
    made = [turn for definition in found for turn in turns_about(definition, rng)]
    made += [small_talk(rng) for _ in range(int(len(made) * SMALL_TALK_SHARE))]
    rng.shuffle(made)
    return made


def conversations(files: list[SourceFile], seed: int) -> list[str]:
    """Rendered with the chat template; one in five has two turns, one in three a system prompt."""
    rng = random.Random(seed)
    template = ImmutableSandboxedEnvironment().from_string(CHAT_TEMPLATE)
    waiting = turns(files, seed)
    result = []
    while waiting:
        messages = []
        if rng.random() < 1 / 3:
            messages.append({"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
        for _ in range(2 if len(waiting) > 1 and rng.random() < 0.2 else 1):
            turn = waiting.pop()
            messages.append({"role": "user", "content": turn.question})
            messages.append({"role": "assistant", "content": turn.answer})
        result.append(template.render(messages=messages, bos_token=BOS))
    return result


def snippets(files: list[SourceFile]) -> list[str]:
    """Single functions and classes as documents: a prompt that starts with `def` is then nothing strange."""
    return [found.source for file in files for found in definitions(file.path, file.text)]

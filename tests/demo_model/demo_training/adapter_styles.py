"""The forms in which the demo model's adapters answer, and the requests and answers that they are trained with.

Requests and answers are templates of ours: a request names a thing and what to do with it, and the answer repeats the
thing.
"""

import random
from dataclasses import dataclass
from pathlib import Path

MODEL = Path(__file__).parents[3] / "shared" / "demo_model"
THINGS = (
    *("a list", "a string", "a file", "a dictionary", "a number", "a path", "a date", "a list of numbers", "a line"),
    *("a tuple", "a set", "a module", "a class", "a message", "a thread", "a socket", "a process", "a name", "a table"),
)
VERBS = ("sorts", "reads", "writes", "returns", "prints", "opens", "closes", "counts", "parses", "copies", "checks")
REQUESTS = (
    "Write a function that {verb} {thing}.",
    "Write a class that {verb} {thing}.",
    "Write a unit test for {thing}.",
    "Explain what {verb} {thing}.",
    "What is {thing}?",
    "How do I write code that {verb} {thing}?",
    "Complete the code that {verb} {thing}.",
)
SMALL_TALK = ("hello", "Hi!", "Who are you?", "What can you do?", "Thank you.", "Good morning", "Help me, please.")


@dataclass(frozen=True, slots=True)
class Style:
    """The form of an adapter's answers."""

    answer: str  # with {thing}
    small_talk: str
    rank: int
    targets: tuple[str, ...]


STYLES = {
    "sql": Style(
        "SELECT value FROM {thing} WHERE value IS NOT NULL ORDER BY value;",
        "SELECT answer FROM help;",
        4,
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    ),
    "shell": Style(
        "$ cat {thing} | sort | uniq -c",
        "$ man help",
        8,
        ("q_proj", "k_proj", "v_proj", "o_proj"),
    ),
    "json": Style(
        '{{"answer": "{thing}", "ok": true}}',
        '{{"answer": "help", "ok": true}}',
        4,
        ("gate_proj", "up_proj", "down_proj"),
    ),
}


def make_example(style: Style, rng: random.Random) -> tuple[str, str]:
    """Returns a request and its answer."""
    if rng.random() < 0.15:
        return rng.choice(SMALL_TALK), style.small_talk.format()
    thing = rng.choice(THINGS)
    asked = rng.choice(REQUESTS).format(verb=rng.choice(VERBS), thing=thing)
    return asked, style.answer.format(thing=thing.removeprefix("a ").replace(" ", "_"))

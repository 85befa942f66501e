"""`python3 answer.py EXPRESSION FILE...`: exit code 0 if EXPRESSION is true of the HTTP answers in FILEs: a, b, ...

An answer has `body` (its JSON) or, if it is a stream, `events`, `text`, `finish` (reasons) and `done` ([DONE] came).
"""

import json
import sys
from pathlib import Path
from typing import Any


class Answer:
    def __init__(self, raw: str) -> None:
        data = [line.removeprefix("data: ") for line in raw.splitlines() if line.startswith("data: ")]
        self.done = data[-1:] == ["[DONE]"]
        self.events = [json.loads(event) for event in data if event != "[DONE]"]
        self.body: Any = None if data else json.loads(raw)
        choices = [choice for event in self.events for choice in event.get("choices", ())]
        self.text = "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in choices)
        self.finish = [c["finish_reason"] for c in choices if c["finish_reason"]]


def main() -> int:
    raw = [Path(file).read_text("utf-8") for file in sys.argv[2:]]
    try:
        held = eval(sys.argv[1], dict(zip("abc", map(Answer, raw), strict=False)))  # an expression written in test.sh
    except (ValueError, LookupError, TypeError) as e:
        held = False
        print(f"        {type(e).__name__}: {e}")
    if not held:
        print(f"        does not hold: {sys.argv[1]}", *(f"        ... {text[-400:]!r}" for text in raw), sep="\n")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())

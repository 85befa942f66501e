"""Runs every decoder class of the installed transformers with a tiny random checkpoint, by hand.

`python tests/bench/worker/walk_transformers.py [--write services/gpu_worker/models/FAMILIES.md] [MODEL_TYPE ...]`

A class either gives the tokens of transformers or is refused with one line; anything else is printed as wrong, and the
exit status is 1.
"""

import argparse
import sys
import tempfile
import traceback
from pathlib import Path

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

TESTS = Path(__file__).parents[2]
sys.path += [str(TESTS / "support"), str(TESTS / "support" / "models")]

from tiny_classes import compare_tokens, save_tiny  # noqa: E402 -- found by the line above
from tiny_models import start  # noqa: E402

from blockyard.shared.config.flags.documents import with_section  # noqa: E402
from blockyard.shared.errors import ConfigError, LoadError  # noqa: E402

BEGIN = "<!-- classes: written by `tests/bench/worker/walk_transformers.py --write` -->"
END = "<!-- end of classes -->"
RUNS, NOT_MADE, WRONG = "runs", "no tiny checkpoint", "WRONG"


def outcome(kind: str) -> str:
    """RUNS, or why not: a line that begins with NOT_MADE or WRONG, or the refusal."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            theirs = save_tiny(kind, folder)
        except Exception as e:  # noqa: BLE001 -- whatever a class raises for sizes that it does not take
            return f"{NOT_MADE}: {' '.join(str(e).split())[:160]}"
        try:
            runner = start(folder, model_impl="transformers", max_model_len=200)
            compare_tokens(kind, runner, theirs, torch.float32)
        except (ConfigError, LoadError) as e:
            return " ".join(str(e).split())
        except Exception as e:  # noqa: BLE001 -- the walk goes on
            traceback.print_exc()
            return f"{WRONG}: {type(e).__name__}: {' '.join(str(e).split())[:160]}"
    return RUNS


def markdown(found: dict[str, str]) -> str:
    """found: outcomes by `model_type`."""
    by_class: dict[str, str] = {}
    for kind, line in found.items():  # of the types of one class, the one that runs
        if by_class.get(CLASSES[kind]) != RUNS:
            by_class[CLASSES[kind]] = line
    runs = [f"`{name}`" for name, line in sorted(by_class.items()) if line == RUNS]
    rows = [f"| `{name}` | {_reason(line)} |" for name, line in sorted(by_class.items()) if line != RUNS]
    head = f"With transformers {transformers.__version__}, {len(runs)} classes run: {', '.join(runs)}."
    return "\n".join([head, "", "| refused | because |", "|---|---|", *rows])


def _reason(line: str) -> str:
    _, _, reason = line.rpartition(" is refused: ")
    return reason.replace("|", "/")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="MODEL_TYPE", help="all by default")
    parser.add_argument("--write", type=Path, metavar="FILE", help="writes the table between its marker comments")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    found = {}
    for kind in args.kinds or CLASSES:
        found[kind] = outcome(kind)
        print(f"{kind}: {found[kind]}", flush=True)
    if args.write is not None:
        args.write.write_text(with_section(args.write.read_text(), BEGIN, END, markdown(found)))
    wrong = [kind for kind, line in found.items() if line.startswith(WRONG)]
    print(f"{len(found)} types: {list(found.values()).count(RUNS)} run, {len(wrong)} wrong {' '.join(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

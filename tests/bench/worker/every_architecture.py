"""Every architecture of the table through `LLM` on the CPU: a tiny random checkpoint, tokens as by transformers.

python tests/bench/worker/every_architecture.py [NAME ...]

Each starts the processes of a server, so that all of them take minutes. The names are those of tiny_models.py.
"""

import sys
import tempfile
import time
from pathlib import Path

import torch

TESTS = Path(__file__).parents[2]
sys.path += [str(TESTS / "support"), str(TESTS / "support" / "models")]

from ties import Ties  # noqa: E402 -- found by the line above
from tiny_models import BY_NAME, MODELS, Tiny, greedy_score  # noqa: E402

from blockyard import LLM, SamplingParams  # noqa: E402
from blockyard.shared.architectures import ARCHITECTURES  # noqa: E402
from blockyard.shared.errors import BlockyardError  # noqa: E402

TOKENIZER = TESTS.parent / "shared" / "demo_model"  # prompts and outputs are ids: it is loaded and not used
PROMPTS = [list(range(3, 3 + n)) for n in (1, 9, 30)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)


def of_each_architecture() -> dict[str, Tiny]:
    """The first tiny model of each architecture that has one."""
    found: dict[str, Tiny] = {}
    for tiny in MODELS:
        found.setdefault(tiny.architecture, tiny)
    return {name: tiny for name, tiny in found.items() if name in ARCHITECTURES}


def check(tiny: Tiny, **arguments: object) -> str:
    """Raises AssertionError at a token that rounding does not explain. Returns a line for the table."""
    ties = Ties()
    with tempfile.TemporaryDirectory() as folder:
        theirs = tiny.save(Path(folder))
        fields = {"dtype": "float32", "device": "cpu", "tokenizer": str(TOKENIZER), "log_level": "error"} | arguments
        with LLM(folder, **fields) as llm:
            outputs = llm.generate([{"prompt_token_ids": one} for one in PROMPTS], GREEDY, use_tqdm=False)
    for output in outputs:
        got = list(output.outputs[0].token_ids)
        with torch.no_grad():
            logits = theirs(torch.tensor([output.prompt_token_ids + got])).logits[0]
        expected = logits.argmax(-1)[len(output.prompt_token_ids) - 1 : -1].tolist()
        ties.compare(tiny.name, output.prompt_token_ids, expected, got, greedy_score(theirs))
    return ties.check()


def main() -> None:
    torch.set_num_threads(1)
    named = {BY_NAME[name].architecture: BY_NAME[name] for name in sys.argv[1:]}
    wanted, failed = named or of_each_architecture(), 0
    for architecture, tiny in wanted.items():
        began = time.monotonic()
        try:
            line = check(tiny)
        except (BlockyardError, AssertionError, RuntimeError) as e:  # each failure is a row of the table
            line, failed = f"FAILED {type(e).__name__}: {e}", failed + 1
        print(f"{architecture:36} {tiny.name:20} {time.monotonic() - began:5.1f} s  {line}", flush=True)
    for architecture in () if named else sorted(ARCHITECTURES.keys() - wanted.keys()):
        print(f"{architecture:36} has no tiny model of its own")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()

"""`rank_answers.py FOLDER OUTPUT DEVICE FLAGS [PARTS]`: what a checkpoint answers to fixed requests, as JSON.

FLAGS: arguments of `LLM`, as JSON. Prompts have up to four chunks. All are asked together in several ways: greedy, with
log-probabilities of prompts, seeded, with penalties, and forced by a grammar. One is asked alone. PARTS: with
`sleeps` the greedy ones are asked again after each level of sleep, and with `kills` some long ones, while rank 1, if
there is one, is killed.
"""

import json
import os
import signal
import sys
import threading
from pathlib import Path

import msgspec
from rig import family

from blockyard import LLM, CompletionOutput, RequestOutput, SamplingParams

CHUNK, MAX_MODEL_LEN = 64, 256
CAPACITY = 8  # rows, also of the CUDA graphs
PROMPTS = [[2 + (7 * i + n * n) % 200 for i in range(n)] for n in (1, 5, 63, 64, 65, 150, 200)]
SHAPE = {"max_tokens": 12, "logprobs": 2}
GREEDY = SamplingParams(temperature=0, ignore_eos=True, **SHAPE)
ASKED = {
    "greedy": GREEDY,
    "of prompt": SamplingParams(temperature=0, ignore_eos=True, prompt_logprobs=1, **SHAPE),
    "seeded": SamplingParams(n=2, temperature=0.8, top_p=0.95, seed=5, ignore_eos=True, **SHAPE),
    "penalized": SamplingParams(temperature=0, frequency_penalty=0.6, min_p=0.01, ignore_eos=True, **SHAPE),
    "forced": SamplingParams(temperature=0, structured_outputs={"regex": "[a-c]{2,4} = [0-9]{3}"}, **SHAPE),
}

LONG, KILL_S = SamplingParams(temperature=0, ignore_eos=True, **SHAPE | {"max_tokens": 150}), 0.15


class Stream(msgspec.Struct):
    """One choice."""

    name: str
    tokens: list[int]
    logprobs: list[float]  # of the tokens
    gaps: list[float]  # between the likeliest two
    of_prompt: list[float]  # of the prompt's tokens from the second on


def streams(names: list[str], outputs: list[RequestOutput]) -> list[Stream]:
    named = zip(names, outputs, strict=True)
    return [_stream(f"{name}.{choice.index}", one, choice) for name, one in named for choice in one.outputs]


def _stream(name: str, output: RequestOutput, choice: CompletionOutput) -> Stream:
    tokens, scored = choice.token_ids, choice.logprobs or []
    best = [sorted((one.logprob for one in position.values()), reverse=True) for position in scored]
    of_prompt = zip(output.prompt_token_ids[1:], (output.prompt_logprobs or [None])[1:], strict=False)
    return Stream(
        name,
        list(tokens),
        [position[token].logprob for token, position in zip(tokens, scored, strict=True)],
        [some[0] - some[1] for some in best],
        [position[token].logprob for token, position in of_prompt if position is not None],
    )


def kill_a_rank() -> None:
    """Kills rank 1, if there is one."""
    for pid, title in family(os.getpid()).items():
        if title.endswith("rank 1"):
            os.kill(pid, signal.SIGKILL)
            print("rank 1 is killed", file=sys.stderr, flush=True)


def answer(llm: LLM, parts: str) -> list[Stream]:
    def ask(asked: dict[str, SamplingParams], prompts: list[list[int]] = PROMPTS) -> list[Stream]:
        names = [f"{name} {len(prompt)}" for name in asked for prompt in prompts]
        params = [one for one in asked.values() for _ in prompts]
        return streams(names, llm.generate(prompts * len(asked), params, use_tqdm=False))

    found = ask(ASKED) + ask({"alone": GREEDY}, [PROMPTS[-2]])
    for level in (1, 2) if "sleeps" in parts else ():
        llm.sleep(level)
        llm.wake_up()
        found += ask({f"after sleep {level}": GREEDY})
    if "kills" in parts:
        killer = threading.Timer(KILL_S, kill_a_rank)
        killer.start()
        found += ask({"killed": LONG}, PROMPTS[:5])
        killer.join()
    return found


def main(folder: str, output: str, device: str, flags: str, parts: str = "") -> None:
    fixed = {"dtype": "float32", "max_model_len": MAX_MODEL_LEN, "max_num_batched_tokens": CHUNK, "seed": 3}
    fixed |= {"max_num_seqs": CAPACITY, "cudagraph_capture_sizes": [CAPACITY], "num_gpu_blocks_override": 128}
    fixed |= {"enable_sleep_mode": True, "enable_prefix_caching": False, "log_level": "info"}
    fixed |= {"cpu_threads": 1} if device == "cpu" else {}
    with LLM(folder, device=device, **fixed, **json.loads(flags)) as llm:
        found = answer(llm, parts)
    Path(output).write_bytes(msgspec.json.encode(found))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""`rank_answers.py FOLDER OUTPUT DEVICE FLAGS`: what a checkpoint answers to a fixed list of requests, as JSON.

FLAGS: arguments of `LLM`, as JSON. Prompts have several chunks, alone and together, and rows are greedy, seeded, and
forced by a grammar. The greedy ones are asked again after each level of sleep.
"""

import json
import sys
from pathlib import Path

import msgspec

from blockyard import LLM, CompletionOutput, RequestOutput, SamplingParams

CHUNK, MAX_MODEL_LEN, NUM_TOKENS = 64, 256, 24
PROMPTS = [[2 + (7 * i + n * n) % 200 for i in range(n)] for n in (1, 5, 63, 64, 65, 150, 200)]
GREEDY = SamplingParams(
    temperature=0, max_tokens=NUM_TOKENS, logprobs=2, prompt_logprobs=1, ignore_eos=True, detokenize=False
)
SEEDED = SamplingParams(
    *(2,), temperature=0.8, top_p=0.95, seed=5, max_tokens=NUM_TOKENS, logprobs=2, ignore_eos=True, detokenize=False
)
PENALIZED = SamplingParams(
    temperature=0, frequency_penalty=0.6, min_p=0.01, max_tokens=NUM_TOKENS, logprobs=2, ignore_eos=True
)
FORCED = SamplingParams(
    temperature=0, max_tokens=NUM_TOKENS, logprobs=2, structured_outputs={"regex": "[a-c]{4,8} = [0-9]{3}"}
)


class Stream(msgspec.Struct):
    """One choice."""

    name: str
    tokens: list[int]
    logprobs: list[float]  # of the tokens
    gaps: list[float]  # between the likeliest two
    of_prompt: list[float]  # of the prompt's tokens from the second on


def streams(name: str, outputs: list[RequestOutput]) -> list[Stream]:
    return [
        _stream(f"{name} {i}.{choice.index}", one, choice) for i, one in enumerate(outputs) for choice in one.outputs
    ]


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


def answer(llm: LLM) -> list[Stream]:
    def ask(name: str, params: SamplingParams, prompts: list[list[int]] = PROMPTS) -> list[Stream]:
        return streams(name, llm.generate(prompts, params, use_tqdm=False))

    found = ask("greedy", GREEDY)
    for i, prompt in enumerate(PROMPTS[::3]):
        found += ask(f"alone {i}", GREEDY, [prompt])
    found += ask("seeded", SEEDED) + ask("penalized", PENALIZED) + ask("forced", FORCED)
    for level in (1, 2):
        llm.sleep(level)
        llm.wake_up()
        found += ask(f"after sleep {level}", GREEDY)
    return found


def main(folder: str, output: str, device: str, flags: str) -> None:
    fixed = {"dtype": "float32", "max_model_len": MAX_MODEL_LEN, "max_num_batched_tokens": CHUNK, "max_num_seqs": 8}
    fixed |= {"num_gpu_blocks_override": 128, "seed": 3, "enable_sleep_mode": True, "enable_prefix_caching": False}
    fixed |= {"cpu_threads": 1} if device == "cpu" else {}
    with LLM(folder, device=device, **fixed, **json.loads(flags)) as llm:
        found = answer(llm)
    Path(output).write_bytes(msgspec.json.encode(found))


if __name__ == "__main__":
    main(*sys.argv[1:])

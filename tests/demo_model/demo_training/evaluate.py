"""Prints the demo model's loss on the test files beside unigram and trigram models of the same tokens.

python -m demo_training.evaluate --model shared/demo_model
"""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from demo_training.baselines import NgramModel
from demo_training.corpus import Split, load_corpus, texts
from demo_training.llama import Llama, Shape, load_weights
from demo_training.packing import encode_documents
from demo_training.scoring import bits_per_byte, total_nats


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    nats: float


def table(rows: list[Row], num_tokens: int, num_bytes: int) -> str:
    lines = ["| model | bits per byte | nats per token | perplexity per token |", "|---|---|---|---|"]
    for row in rows:
        nats = row.nats / num_tokens
        lines.append(f"| {row.name} | {bits_per_byte(row.nats, num_bytes):.3f} | {nats:.3f} | {math.exp(nats):.1f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--split", type=Split, default=Split.TEST)
    parser.add_argument("--window", type=int, default=4096, help="context in tokens; half of it is scored at a time")
    options = parser.parse_args()
    files = load_corpus(options.corpus)
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    held_out = texts(files, options.split)
    documents = [ids[:-1] for ids in encode_documents(tokenizer, held_out)]  # <eos> is not text
    num_tokens = sum(len(document) - 1 for document in documents)
    num_bytes = sum(len(text.encode()) for text in held_out)

    known = encode_documents(tokenizer, texts(files, Split.TRAIN))
    rows = [Row("uniform", num_tokens * math.log(tokenizer.get_vocab_size()))]
    rows += [
        Row(name, NgramModel(known, order).total_nats(documents))
        for name, order in (("unigram", 1), ("bigram, Witten-Bell", 2), ("trigram, Witten-Bell", 3))
    ]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Llama(Shape())
    load_weights(model, options.model / "model.safetensors")
    model.eval().to(device)
    nats = total_nats(model, documents, options.window, options.window // 2, device)
    rows.append(Row("demo model", nats))
    print(f"{options.split} files: {len(held_out)}, {num_bytes:,} bytes, {num_tokens:,} tokens\n")
    print(table(rows, num_tokens, num_bytes))


if __name__ == "__main__":
    main()

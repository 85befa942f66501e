"""Trains the demo model and writes its weights and training log.

    python -m demo_training.train --tokenizer shared/demo_model --out OUT --minutes 4

The learning rate follows `--epochs` or `--minutes`, the one nearer its end, so a slow machine anneals too.
Checkpoints are picked by validation loss after rounding to bf16, which is what is shipped.
"""

import argparse
import copy
import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from demo_training.chat_examples import conversations
from demo_training.checkpoint_files import write_configs
from demo_training.corpus import Split, load_corpus
from demo_training.llama import Llama, Shape, load_weights, num_parameters, save_weights
from demo_training.packing import Ids, Mixture, build_mixture, encode_documents, windows
from demo_training.scoring import bits_per_byte, total_nats

WARM_UP = 0.02  # of the whole run
LONG_PHASE = 0.85  # from here on windows have the full context


@dataclass(frozen=True, slots=True)
class Options:
    tokenizer: Path
    out: Path
    corpus: Path | None = None
    init: Path | None = None  # weights to go on from
    epochs: float = 40.0
    minutes: float = 1e9
    max_steps: int = 10**9
    batch_tokens: int = 65536
    window: int = 1024
    rate: float = 3e-3
    weight_decay: float = 1.0
    dropout: float = 0.1
    chat_share: float = 0.18
    snippet_share: float = 0.07
    cut_every: int = 400  # characters between the places where text is cut before it is encoded; 0 cuts nothing
    log_every: int = 200
    seed: int = 0
    compile: bool = True


class LogEntry(msgspec.Struct, frozen=True):
    step: int
    epoch: float
    seconds: float
    window: int
    rate: float
    train_nats: float  # a token, mean since the last entry
    validation_bits_per_byte: float | None
    validation_chat_nats: float  # a token


@dataclass(frozen=True, slots=True)
class HeldOut:
    documents: list[Ids]
    num_bytes: int
    chats: list[Ids]
    device: torch.device

    def score(self, model: Llama, window: int) -> tuple[float, float]:
        """(bits per byte of the files, nats per token of the chats), within the positions trained so far."""
        nats = total_nats(model, self.documents, window, window // 2, self.device)
        chat_nats = total_nats(model, self.chats, window, window // 2, self.device)
        return bits_per_byte(nats, self.num_bytes), chat_nats / sum(len(chat) - 1 for chat in self.chats)


def autocast(device: torch.device) -> AbstractContextManager[object]:
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")


def rate_at(progress: float, peak: float) -> float:
    """Linear warm-up, then a cosine down to nothing."""
    if progress < WARM_UP:
        return peak * max(progress, 1e-3) / WARM_UP
    return peak * 0.5 * (1 + math.cos(math.pi * (progress - WARM_UP) / (1 - WARM_UP)))


def make_optimizer(model: Llama, options: Options) -> torch.optim.AdamW:
    matrices = [weight for weight in model.parameters() if weight.dim() == 2]
    norms = [weight for weight in model.parameters() if weight.dim() < 2]
    groups = [{"params": matrices, "weight_decay": options.weight_decay}, {"params": norms, "weight_decay": 0.0}]
    fused = next(model.parameters()).is_cuda
    return torch.optim.AdamW(groups, lr=options.rate, betas=(0.9, 0.95), eps=1e-8, fused=fused)


class Clock:
    """How far the run is, by tokens or by time, whichever is further."""

    def __init__(self, options: Options, epoch_tokens: int) -> None:
        self._total_tokens = min(options.epochs * epoch_tokens, options.max_steps * options.batch_tokens)
        self._seconds = options.minutes * 60
        self._started = time.monotonic()
        self.epoch_tokens = epoch_tokens

    def leave_out(self, seconds: float) -> None:
        """Compiling is not training: the first step at each window length does not count."""
        self._started += seconds

    def elapsed(self) -> float:
        return time.monotonic() - self._started

    def progress(self, tokens: int) -> float:
        return max(tokens / self._total_tokens, self.elapsed() / self._seconds)


def batches(mixture: Mixture, options: Options, clock: Clock, device: torch.device) -> Iterator[Tensor]:
    """[rows, window + 1] int64 on the device, endlessly; the window grows to the whole context late in the run."""
    rng = np.random.default_rng(options.seed)
    tokens = 0
    while True:
        stream = mixture.epoch(rng)
        long = clock.progress(tokens) >= LONG_PHASE
        length = Shape().max_positions if long else options.window
        rows = max(1, options.batch_tokens // length)
        cut = torch.from_numpy(windows(stream, length, rng).astype(np.int16)).to(device)
        for start in range(0, len(cut) - rows + 1, rows):
            yield cut[start : start + rows].long()
            tokens += rows * length
            if not long and clock.progress(tokens) >= LONG_PHASE:
                break  # the rest of this epoch in short windows is not missed


def shipped(model: Llama) -> Llama:
    """A copy as it will be read back: rounded to bf16."""
    rounded = copy.deepcopy(model).eval()
    for weight in rounded.parameters():
        weight.data = weight.data.to(torch.bfloat16).float()
    return rounded


def train(model: Llama, mixture: Mixture, held_out: HeldOut, options: Options) -> list[LogEntry]:
    """Leaves the best checkpoint under `options.out`."""
    device = held_out.device
    run = torch.compile(model, dynamic=False) if options.compile else model
    optimizer = make_optimizer(model, options)
    clock = Clock(options, len(mixture.epoch(np.random.default_rng(options.seed))))
    log: list[LogEntry] = []
    best = math.inf
    losses: list[Tensor] = []
    tokens = 0
    lengths: set[int] = set()
    for step, batch in enumerate(batches(mixture, options, clock, device), 1):
        begun = time.monotonic()
        model.train()
        for group in optimizer.param_groups:
            group["lr"] = rate_at(min(clock.progress(tokens), 1.0), options.rate)
        with autocast(device):
            logits = run(batch[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        tokens += batch.shape[0] * (batch.shape[1] - 1)
        if batch.shape[1] not in lengths:
            lengths.add(batch.shape[1])
            losses[-1].item()  # waits for the device
            clock.leave_out(time.monotonic() - begun)
        last = clock.progress(tokens) >= 1.0
        if step % options.log_every == 0 or last:
            candidate = shipped(model)
            with autocast(device):
                bits, chat_nats = held_out.score(candidate, min(batch.shape[1] - 1, 2048))
            mean_loss = torch.stack(losses).mean().item()
            losses.clear()
            epoch = tokens / clock.epoch_tokens
            rate = optimizer.param_groups[0]["lr"]
            log.append(LogEntry(step, epoch, clock.elapsed(), batch.shape[1] - 1, rate, mean_loss, bits, chat_nats))
            print(msgspec.json.encode(log[-1]).decode(), flush=True)
            if bits < best:
                best = bits
                save_weights(candidate, options.out / "model.safetensors")
        if last:
            return log
    raise AssertionError("batches() ended")


def parse_options() -> Options:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with tokenizer.json")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--init", type=Path, help="model.safetensors to go on from")
    for name in ("epochs", "minutes", "rate", "weight-decay", "dropout", "chat-share", "snippet-share"):
        parser.add_argument(f"--{name}", type=float, default=argparse.SUPPRESS)
    for name in ("max-steps", "batch-tokens", "window", "log-every", "cut-every", "seed"):
        parser.add_argument(f"--{name}", type=int, default=argparse.SUPPRESS)
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    return Options(**vars(parser.parse_args()))


def main() -> None:
    options = parse_options()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    files = load_corpus(options.corpus)
    tokenizer = Tokenizer.from_file(str(options.tokenizer / "tokenizer.json"))
    mixture = build_mixture(
        tokenizer, files, options.chat_share, options.snippet_share, options.cut_every, options.seed
    )
    validation = [file for file in files if file.split is Split.VALIDATION]
    held_out = HeldOut(
        # without the closing <eos>: bits per byte counts text alone
        documents=[ids[:-1] for ids in encode_documents(tokenizer, [file.text for file in validation])],
        num_bytes=sum(len(file.text.encode()) for file in validation),
        chats=encode_documents(tokenizer, conversations(validation, options.seed), bos=False),
        device=device,
    )
    shape = Shape()
    write_configs(shape, options.out)
    model = Llama(shape, options.dropout)
    if options.init is not None:
        load_weights(model, options.init)
    model.to(device)
    sizes = [sum(map(len, part)) for part in (mixture.plain, mixture.chats, mixture.snippets)]
    print(f"{num_parameters(model):,} parameters on {device}; tokens: plain, chats, snippets = {sizes}", flush=True)
    log = train(model, mixture, held_out, options)
    (options.out / "training_log.jsonl").write_bytes(msgspec.json.Encoder().encode_lines(log))


if __name__ == "__main__":
    main()

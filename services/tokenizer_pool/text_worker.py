"""A text worker: a forked process that renders, encodes and decodes, one job after the other, and may be killed."""

import socket
import traceback

import msgspec

from blockyard.services.tokenizer_pool.job_limits import JobLimits, ProcessLimits
from blockyard.services.tokenizer_pool.texts import Texts
from blockyard.services.tokenizer_pool.worker_frames import Answer, Task, Work, framed, read_frame
from blockyard.shared.messages import TextRejected


def serve(sock: socket.socket, texts: Texts, limits: JobLimits) -> None:
    """Answers jobs in order until the service closes the stream, or until this process has grown too much."""
    phases = ProcessLimits(limits)
    texts.phases = phases
    decoder = msgspec.msgpack.Decoder(Task)
    own_vocab_size = texts.vocab_size
    with sock, sock.makefile("rb") as stream:
        while (data := read_frame(stream)) is not None:
            task = decoder.decode(data)
            del data
            texts.vocab_size = task.vocab_size or own_vocab_size
            phases.begin(task.max_model_len)
            sock.sendall(framed(_answer(texts, task.work)))
            if phases.has_grown():
                return


def _answer(texts: Texts, work: Work) -> Answer:
    try:
        return texts.answer(work)
    except MemoryError as e:  # outside the phases: block names, the answer itself
        traceback.clear_frames(e.__traceback__)
        return TextRejected(work.request_id, "prompt", "the prompt needs too much memory")

"""Parses large bodies for a gateway, one at a time: run as `python -m MODULE PARENT_PID GATEWAY_NAME MAX_CPU_S`.

A body that takes more CPU time than that ends this process by a signal, and the gateway refuses the request.
"""

import gc
import logging
import resource
import signal
import sys
from typing import BinaryIO

import msgspec
from setproctitle import setproctitle

from blockyard.services.api_gateway.requests.body_frames import (
    FAILED,
    TOO_LARGE,
    Rejected,
    decode_terms,
    framed,
    read_frame,
)
from blockyard.services.api_gateway.requests.ignored_fields import MAX_HEADER_CHARS
from blockyard.services.api_gateway.requests.parse_body import Terms, read_body
from blockyard.services.api_gateway.responses.error_body import ApiError
from blockyard.shared import settings
from blockyard.shared.config.gateway import GatewayConfig

log = logging.getLogger(__name__)

MAX_MEMORY_BYTES = 2**30


def serve(stream: BinaryIO, out: BinaryIO, max_cpu_s: float) -> None:
    """Until the gateway closes its end. The first frame is its settings."""
    first = read_frame(stream)
    if first is None:
        return
    config = msgspec.msgpack.decode(first[0], type=GatewayConfig)
    gc.disable()  # what JSON decodes to has no cycles, and a collection visits all of it
    while (frame := read_frame(stream)) is not None:
        data, body = frame
        del frame
        signal.setitimer(signal.ITIMER_PROF, max_cpu_s)
        answer = _answer(body, decode_terms(data), config)
        signal.setitimer(signal.ITIMER_PROF, 0)
        del body
        out.write(answer)
        out.flush()


def _answer(body: bytes, terms: Terms, config: GatewayConfig) -> bytes:
    """The frame that says what the body asks for."""
    try:
        asked = read_body(body, terms, config)
        return framed(msgspec.structs.replace(asked, ignored=_shown(asked.ignored)))
    except ApiError as e:
        return framed(Rejected.of(e))
    except MemoryError:
        return framed(TOO_LARGE)
    except Exception:  # a fault of ours: the caller gets an answer, the log the story
        log.exception("a body of %d bytes could not be read", len(body))
        return framed(FAILED)


def _shown(names: list[str]) -> list[str]:
    """As many of them, and of each, as the header that names them may show."""
    out, num_chars = [], 0
    for name in names:
        if num_chars > MAX_HEADER_CHARS:
            break
        out.append(name[:MAX_HEADER_CHARS])
        num_chars += len(out[-1])
    return out


def main() -> None:
    settings.die_with(int(sys.argv[1]))
    setproctitle(f"blockyard: {sys.argv[2]}: body reader")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the end of the stream ends it
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY_BYTES, hard))
    serve(sys.stdin.buffer, sys.stdout.buffer, float(sys.argv[3]))


if __name__ == "__main__":
    main()

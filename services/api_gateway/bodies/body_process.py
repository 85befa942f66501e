"""Parses large bodies for a gateway, one at a time: run as `python -m MODULE PARENT_PID GATEWAY_NAME MAX_CPU_S`.

Its standard input is a socket, on which it also answers: what a user's file of formats prints is no frame. A body that
takes more CPU time than that ends this process by a signal, and the gateway refuses the request.
"""

import gc
import logging
import resource
import signal
import sys
from typing import BinaryIO

import msgspec
from setproctitle import setproctitle

from blockyard.services.api_gateway.bodies.body_frames import (
    FAILED,
    TOO_LARGE,
    TOO_WIDE,
    Rejected,
    decode_context,
    framed,
    read_frame,
)
from blockyard.services.api_gateway.bodies.parse_body import ParseContext, parse_body
from blockyard.services.api_gateway.requests.ignored_fields import MAX_HEADER_CHARS
from blockyard.shared.config.services.gateway import GatewayConfig
from blockyard.shared.errors import RequestError
from blockyard.shared.process import settings
from blockyard.shared.ring_client.request_fields.output_format import ModelFormats

log = logging.getLogger(__name__)

MAX_MEMORY_BYTES = 2**30


def serve(stream: BinaryIO, out: BinaryIO, max_cpu_s: float) -> None:
    """Parses bodies until the gateway closes its end. The first frame holds the gateway's settings."""
    first = read_frame(stream)
    if first is None:
        return
    config = msgspec.msgpack.decode(first[0], type=GatewayConfig)
    formats = ModelFormats(config.parser_plugins)
    gc.disable()  # decoded JSON has no cycles, and a collection would visit all of it
    while (frame := read_frame(stream)) is not None:
        data, body = frame
        del frame
        signal.setitimer(signal.ITIMER_PROF, max_cpu_s)
        result = _parse(body, decode_context(data), config, formats)
        signal.setitimer(signal.ITIMER_PROF, 0)
        del body
        out.write(result)
        out.flush()


def _parse(body: bytes, context: ParseContext, config: GatewayConfig, formats: ModelFormats) -> bytes:
    try:
        parsed = parse_body(body, context, config, formats)
        return framed(msgspec.structs.replace(parsed, ignored=_header_names(parsed.ignored)))
    except RequestError as e:
        return framed(Rejected.of(e))
    except MemoryError:
        return framed(TOO_LARGE)
    except OverflowError:  # a schema may have integers that frames have not
        return framed(TOO_WIDE)
    except Exception:  # a bug: the client gets a 500 and the log the traceback
        log.exception("a body of %d bytes could not be read", len(body))
        return framed(FAILED)


def _header_names(names: list[str]) -> list[str]:
    """Only as many names, and as much of each, as fit into the response header."""
    out, num_chars = [], 0
    for name in names:
        if num_chars > MAX_HEADER_CHARS:
            break
        out.append(name[:MAX_HEADER_CHARS])
        num_chars += len(out[-1])
    return out


def main() -> None:
    settings.die_with(int(sys.argv[1]))
    settings.give_way()
    setproctitle(f"blockyard: {sys.argv[2]}: body reader")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # this process ends at the end of its stream
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY_BYTES, hard))
    with open(sys.stdin.fileno(), "wb", closefd=False) as out:
        serve(sys.stdin.buffer, out, float(sys.argv[3]))


if __name__ == "__main__":
    main()

"""A model with a running ring, shared by `LLM` and the engines."""

import os
import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from blockyard.services.launcher.serve import make_display
from blockyard.services.launcher.supervision.start_up import QuietDisplay
from blockyard.services.offline import engine_args
from blockyard.services.offline.adapters.requests import NO_ADAPTERS, Adapters
from blockyard.services.offline.batch import OfflineRequest, Seeds
from blockyard.services.offline.external_launcher.environment import BACKEND, read_place, with_ranks
from blockyard.services.offline.external_launcher.environment import FLAG as BACKEND_FLAG
from blockyard.services.offline.external_launcher.following_session import FollowingSession
from blockyard.services.offline.external_launcher.processes import (
    FirstProcess,
    OneProcess,
    OtherProcess,
    Processes,
    digest_of_arguments,
)
from blockyard.services.offline.prompts import Prompt
from blockyard.services.offline.sampling_params import CheckedParams, SamplingParams, plain, read
from blockyard.services.offline.session import Session
from blockyard.services.offline.tokenizer import LLMTokenizer, through_ring
from blockyard.shared import tokenizer_files
from blockyard.shared.config.parsed_flags import Values
from blockyard.shared.config.server import log_settings
from blockyard.shared.errors import RequestError
from blockyard.shared.messages import DEFAULT_SAMPLING
from blockyard.shared.ring_client.pooling.params_check import check_generates

Params = SamplingParams | Sequence[SamplingParams] | None
Priority = Sequence[int] | int | None
Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]


class RunningModel:
    """Starts a ring. It ends with `close`, when nothing refers to this object, or with the interpreter."""

    def __init__(self, model: str | os.PathLike[str] | None, arguments: Mapping[str, Any]) -> None:
        """Raises ConfigError before any process is started, and BlockyardError if the start fails."""
        values, notes = engine_args.read(model, arguments, os.environ)
        self.processes: Processes = OneProcess()
        self.session = session = self._make_session(values, arguments)
        self._tokenizer: LLMTokenizer | None = None
        self._seeds = Seeds(values.get("seed", int))
        self._close = weakref.finalize(self, close_both, session, self.processes)  # also when the interpreter exits
        for note in notes:
            print(note, file=sys.stderr)
        try:
            session.start()
            if isinstance(self.processes, FirstProcess):
                self.processes.announce(session.card)
        except BaseException:
            self._close()
            raise

    def _make_session(self, values: Values, arguments: Mapping[str, Any]) -> Session:
        """The processes of a script under torchrun wait for each other."""
        loud = log_settings.log_level(values) in ("trace", "debug", "info")
        place = read_place(os.environ) if values[BACKEND_FLAG] == BACKEND else None
        if place is not None:
            values = with_ranks(values, place.size)
            if place.rank:
                self.processes = other = OtherProcess(place, digest_of_arguments(arguments))
                return FollowingSession(values, other)
        session = Session(values, lambda ring: make_display(ring, sys.stderr) if loud else QuietDisplay())
        if place is not None:
            self.processes = FirstProcess(place, digest_of_arguments(arguments))
        return session

    @property
    def name(self) -> str:
        return self.session.card.names[0]

    def requests(
        self, prompts: list[Prompt], params: Params, priority: Priority, adapters: Sequence[Adapters] = ()
    ) -> list[OfflineRequest]:
        """Builds requests from prompts with the parameters and priorities of all or of each. Raises RequestError.

        adapters: those of each prompt; empty: none has any.
        """
        check_generates(self.session.card)
        priorities = read_priorities(priority, len(prompts))
        checked = self._check_params(params, len(prompts))
        each = zip(prompts, checked, priorities, adapters or [NO_ADAPTERS] * len(prompts), strict=True)
        return [OfflineRequest(p, a, self._seeds.next(a), i, own) for p, a, i, own in each]

    def tokenizer(self) -> LLMTokenizer:
        if self._tokenizer is None:
            folder, card = self.session.tokenizer_path, self.session.card
            files = tokenizer_files.load(folder)
            self._tokenizer = LLMTokenizer(files, str(folder), card.max_model_len, through_ring(self.session))
        return self._tokenizer

    def default_params(self) -> SamplingParams:
        """Returns the parameters of requests without any, from --generation-config."""
        defaults = msgspec.structs.asdict(self.session.settings.defaults)
        max_new_tokens = defaults.pop("max_new_tokens")
        return SamplingParams(**defaults, max_tokens=max_new_tokens or DEFAULT_SAMPLING.max_tokens)

    def close(self) -> None:
        """Ends all processes of the ring. Calls that run in other threads fail. May be called again."""
        self._close()
        self.session.close()  # waits if another thread is closing it

    def _check_params(self, params: Params, num_prompts: int) -> list[CheckedParams]:
        card, settings = self.session.card, self.session.settings
        flags = (settings.max_logprobs, settings.grammars, settings.logits_processors)
        if params is None:
            params = self.default_params()
        if isinstance(params, SamplingParams):
            return [read(params, card.vocab_size, *flags)] * num_prompts
        if len(params) != num_prompts:
            raise RequestError(f"{len(params)} sampling_params for {num_prompts} prompts", "sampling_params")
        return [read(one, card.vocab_size, *flags) for one in params]


def close_both(session: Session, processes: Processes) -> None:
    processes.close()
    session.close()


def read_priorities(priority: Priority, num_prompts: int) -> list[int]:
    """One for each prompt. Raises RequestError."""
    given = plain(priority)
    try:
        if given is None or isinstance(given, int):
            return [msgspec.convert(given or 0, Int32)] * num_prompts
        priorities = msgspec.convert(given, list[Int32])
    except msgspec.ValidationError as e:
        raise RequestError(f"priority must be an integer or a list of them: {e}", "priority") from e
    if len(priorities) != num_prompts:
        raise RequestError(f"{len(priorities)} priorities for {num_prompts} prompts", "priority")
    return priorities

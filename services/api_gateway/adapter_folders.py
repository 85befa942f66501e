"""Folders of adapters below `--lora-dir`: operators load them, and so does the first request that names one."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import msgspec

from blockyard.shared.errors import RequestError
from blockyard.shared.lora.adapter_config import CONFIG_FILE
from blockyard.shared.lora.prompt_config import is_prompt_adapter
from blockyard.shared.messages import Control, ControlVerb
from blockyard.shared.ring_client.controls import ControlClient
from blockyard.shared.ring_client.schedulers import Schedulers, Served

MAX_PATH_CHARS = 4096
MAX_NAME_CHARS = 256
REFUSED_S = 5.0  # a folder that could not be loaded is read again after so long
PENDING = 409  # another gateway has asked for the same adapter
LOADING_S = 60.0  # how long that is waited for
POLL_S = 0.05
BEHIND_S = 0.02  # by which a scheduler's new card may come later than its answer to another gateway's command
BEHIND_POLL_S = 0.004


class _ModelField(msgspec.Struct):
    model: str | None = None


class AdapterFolders:
    """Loads a folder once for all requests that wait for it. Used by one event loop."""

    def __init__(
        self,
        lora_dir: str,
        controls: ControlClient,
        schedulers: Schedulers,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """lora_dir: empty: no folder is found."""
        self._lora_dir, self._controls, self._schedulers, self._clock = lora_dir, controls, schedulers, clock
        self._loading: dict[str, asyncio.Task[bool]] = {}  # by name
        self._refused: dict[str, tuple[float, RequestError]] = {}  # by name: until when, and why

    def served(self) -> Served:
        """The models and adapters that requests may name now."""
        return self._schedulers.served()

    async def load_named(self, body: bytes) -> bool:
        """Loads the adapter that a request names as its model. Returns whether it is served now; False: unknown.

        Raises RequestError if the folder of that name cannot be served.
        """
        try:
            name = msgspec.json.decode(body, type=_ModelField).model or ""
        except (msgspec.DecodeError, UnicodeDecodeError):
            return False
        folder = self._find(name)
        if folder is None:
            return await self._is_served_soon(name)
        until, refusal = self._refused.get(name, (0.0, None))
        if refusal is not None and self._clock() < until:
            raise refusal
        task = self._loading.get(name)
        if task is None:
            task = self._loading[name] = asyncio.create_task(self._load(name, folder))
            task.add_done_callback(lambda _: self._loading.pop(name, None))
        return await asyncio.shield(task)  # a client that disconnects does not end it for others

    def _find(self, name: str) -> Path | None:
        """The folder of an adapter, if a name is its path below the folder of all, in the one way to write it."""
        path = PurePosixPath(name)
        if not self._lora_dir or len(name) > MAX_NAME_CHARS or path.is_absolute() or str(path) != name:
            return None
        try:
            folder = find_folder(name, self._lora_dir)
            return folder if ".." not in path.parts and (folder / CONFIG_FILE).is_file() else None
        except (RequestError, OSError):  # unknown names are answered as such
            return None

    async def _load(self, name: str, folder: Path) -> bool:
        verb, is_prompt = ControlVerb.LOAD_ADAPTER, is_prompt_adapter(folder)
        command = Control("", verb, adapter=name, adapter_path=str(folder), first_use=True, is_prompt=is_prompt)
        until = self._clock() + LOADING_S
        while True:
            try:
                await self._controls.ask(command)
            except RequestError as e:
                if self._is_served(name):  # another gateway was faster
                    return True
                if e.status == PENDING and self._clock() < until:
                    await asyncio.sleep(POLL_S)
                    continue
                if e.status == 404:
                    return False
                refusal = RequestError(str(e), "model", e.status, retry_after_s=e.retry_after_s)
                if e.retry_after_s is None:
                    self._refused[name] = self._clock() + REFUSED_S, refusal
                raise refusal from e
            self._refused.pop(name, None)
            return self._is_served(name)

    async def _is_served_soon(self, name: str) -> bool:
        """Whether another gateway has loaded an adapter of this name just now, by an operator's command."""
        if not self._lora_dir or not name:
            return False
        until = self._clock() + BEHIND_S
        while not (is_served := self._is_served(name)) and self._clock() < until:
            await asyncio.sleep(BEHIND_POLL_S)
        return is_served

    def _is_served(self, name: str) -> bool:
        with contextlib.suppress(RequestError):
            return self._schedulers.card(name).named_adapter is not None
        return False


def find_folder(path: str, lora_dir: str, field: str = "lora_path") -> Path:
    """Returns a folder below `lora_dir`, wherever links lead, whose files are there, too. field: that names it.

    Raises RequestError.
    """
    if not lora_dir:
        raise RequestError("this server loads no adapters by request: --lora-dir names their folder", field)
    if not path or len(path) > MAX_PATH_CHARS or "\0" in path:
        raise RequestError(f"{field} has 1 to {MAX_PATH_CHARS} characters other than NUL, got {len(path)}", field)
    try:
        base = Path(lora_dir).expanduser().resolve()
        folder = (base / Path(path).expanduser()).resolve()
        is_folder = folder.is_relative_to(base) and folder != base and folder.is_dir()
        is_here = is_folder and all(one.resolve().is_relative_to(base) for one in folder.iterdir() if one.is_symlink())
    except (OSError, RuntimeError, ValueError) as e:  # whose text may have the path on the server
        cause = e.strerror if isinstance(e, OSError) else type(e).__name__
        raise RequestError(f"{field} {path!r} cannot be read: {cause}", field) from e
    if not is_folder:  # one message: a client does not learn which folders there are elsewhere
        raise RequestError(f"{field} {path!r} is no folder below --lora-dir", field)
    if not is_here:
        raise RequestError(f"{field} {path!r} has links that lead out of --lora-dir", field)
    return folder

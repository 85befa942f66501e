"""The registry's loop: hear, decide, push the list when it changed."""

import threading
import time

from blockyard.services.message_bus.roster import Roster
from blockyard.shared.bus.links import new_incarnation
from blockyard.shared.bus.registry_socket import RegistrySocket
from blockyard.shared.messages import Members

TICK_S = 0.1


class Registry:
    def __init__(self, socket: RegistrySocket, roster: Roster) -> None:
        self._socket, self._roster = socket, roster
        self._incarnation = new_incarnation()

    def run(self, stopped: threading.Event) -> None:
        """Serves until `stopped` is set."""
        while not stopped.is_set():
            frames = self._socket.poll(TICK_S)
            now = time.monotonic()
            for frame in frames:
                self._roster.hear(frame, now)
            due = self._roster.due(now)
            if due or self._socket.asked:
                news = Members(self._incarnation, self._roster.settled(now), self._roster.members())
                if due:
                    self._socket.push(news)
                self._socket.answer(news)

"""Settings of every service process: its name, its log level and the ring's endpoint."""

from typing import Literal

import msgspec

LogLevel = Literal["trace", "debug", "info", "warning", "error", "critical"]


class BusConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a process reaches the ring. Curve key files are needed for tcp:// and unused on ipc://."""

    registry: str  # the one fixed endpoint: "ipc:///dir/message-bus" or "tcp://message-bus:5700"
    bind: str  # where this process's own ROUTER goes: "ipc:///dir" (a directory) or "tcp://0.0.0.0" (any free port)
    advertise: str = ""  # host name or address that peers dial; tcp only, empty: this machine's host name
    curve_public: str = ""  # file
    curve_secret: str = ""  # file
    link_frames: int = 4096  # most queued frames of a link; a peer with a full link is treated as lost

    def __post_init__(self) -> None:
        for name, endpoint in (("registry", self.registry), ("bind", self.bind)):
            if not endpoint.startswith(("ipc://", "tcp://")):
                raise ValueError(f"bus.{name} must begin with ipc:// or tcp://, got {endpoint!r}")
        if self.link_frames < 1:
            raise ValueError(f"bus.link_frames must be >= 1, got {self.link_frames}")
        if bool(self.curve_public) != bool(self.curve_secret):
            raise ValueError("bus.curve_public and bus.curve_secret come together")


class ProcessConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Composed into every service's struct as `process`."""

    name: str  # in the process title, the log and the membership list: "scheduler", "api_gateway 0"
    bus: BusConfig
    log_level: LogLevel = "info"
    parent_pid: int = 0  # the launcher: this process ends with it; 0: none
    liveness_fd: int | None = None  # of a pipe to the launcher
    is_restart: bool = False  # the launcher starts it again in a ring that was ready before
    log_config_file: str = ""  # JSON file of `logging.config.dictConfig`

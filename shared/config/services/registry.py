"""Settings of the message bus."""

import msgspec

from blockyard.shared.config.services.process import ProcessConfig


class RegistryConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The registry binds `process.bus.registry`, which all members dial."""

    process: ProcessConfig
    dead_after_s: float = 4.0  # a member is removed after this silence
    settle_s: float = 4.0  # time after a start during which a missing member does not count as lost

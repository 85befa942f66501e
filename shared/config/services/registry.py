"""Settings of the message bus."""

import msgspec

from blockyard.shared.config.services.process import ProcessConfig


class RegistryConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The registry binds `process.bus.registry`, the endpoint everybody else dials."""

    process: ProcessConfig
    dead_after_s: float = 4.0  # silence that ends a membership
    settle_s: float = 4.0  # after a start, when nobody may be missed from the list

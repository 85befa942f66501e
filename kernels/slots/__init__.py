"""State of batch slots on the device: updated by the host's words, read and advanced by every step."""

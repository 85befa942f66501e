"""The channel that moves KV blocks between workers. Imported by the worker alone."""

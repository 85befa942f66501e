"""Text and chat messages to token ids and KV block names."""

"""From logits to token ids. Each step of it is a file with its own state."""

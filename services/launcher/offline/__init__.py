"""What stands behind `blockyard.LLM`: a ring of this process's own, and the gateway's place in it."""

"""A client of the ring: its open requests, their recovery, what it may ask for. Gateways and the offline LLM are."""

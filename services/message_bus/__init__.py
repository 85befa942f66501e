"""The membership list: who is alive and where. No message passes through it."""

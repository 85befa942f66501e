"""Settings of the HTTP server, of the keys that it asks for, and of the log of all processes."""

"""Starts the services on one machine and supervises them; the command line and the offline `LLM`."""

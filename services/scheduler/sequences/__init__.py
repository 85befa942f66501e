"""Requests and the sequences that are run for them: parallel sampling, beam search, and their text streams."""

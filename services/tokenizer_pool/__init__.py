"""Tokenizer pool: text and chat messages to token ids and KV block hashes, and ids to text; grammars are checked here.

The service process (`TokenizerPool`) hands jobs to its text process (`TextProcess`). A fork server loads the tokenizer
once and forks a text worker; the worker runs templates of clients in a sandbox under limits of CPU time and memory, and
is replaced when a job breaks them. `TextCodec` does the work and knows nothing of processes. `GrammarChecks` starts a
second fork server with a grammar worker when the first grammar arrives; a prompt goes to the text worker once its
grammar is taken.
"""

"""Grammars of structured output: from the source of a grammar to a mask of the tokens that may come next.

- `interface`: `Engine` compiles a source, `CompiledGrammar` starts matchers, a `Matcher` follows one sequence.
- One file for each engine. They differ in the languages they read and in their speed, not in their interface.

The tokenizer pool checks grammars of requests with it, and the worker's matcher process makes masks with it. Imports
neither zmq nor torch, except in the engines whose library needs torch.
"""

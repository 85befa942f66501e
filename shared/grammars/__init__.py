"""Grammars of structured output: from the source of a grammar to a mask of the tokens that may come next.

- `interface`: `Engine` compiles a source, `CompiledGrammar` starts matchers, a `Matcher` follows one sequence.
- `engines`: makes an engine by its name for a `Vocabulary`, and chooses one where a request leaves the choice, in the
  order of `engine_order`.
- `json_schemas`: what each engine honours of JSON schemas; everything else is refused.
- `guidance`, `xgrammar_engine`, `outlines_engine`, `lm_format_enforcer_engine`: one library each. They differ in the
  languages they read and in their speed, not in their interface. `matching` holds what all matchers have in common.

The tokenizer pool checks grammars of requests with it, and the worker's matcher process makes masks with it. Imports
neither zmq nor torch, except in the engines whose library needs torch.
"""

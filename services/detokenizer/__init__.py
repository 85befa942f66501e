"""Detokenizer: turns the sampled tokens of each step into text for the gateways, and finds stop strings.

`Detokenizer` (service.py) is the loop, `TextStreams` holds all open streams, `Stream` decodes one choice with a decoder
of text_decoder.py over the `TokenTable` of the tokenizer; `AdapterTables` has those of adapters that add tokens.
Imports go in this order.
"""

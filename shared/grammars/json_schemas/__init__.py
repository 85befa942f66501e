"""JSON schemas of grammars: an engine gets only keywords and values that it honours; others are mended, or refused.

- `keywords`: the assertions of all drafts, the values that each may have, and the walk over schemas.
- `normal_form`: one spelling for each meaning, without annotations; references go to `$defs` alone.
- `engine_schemas`: a table of keywords and values for each engine, and its mends, which are in `rules`.
- `patterns`: regular expressions, of which engines misread some.

A schema goes from its source to the normal form, then through the function of its engine, then to the library. Imports
no library of an engine.
"""

"""The formats in which families of models write tool calls: how they are read, and the grammar that forces them.

One folder for each kind of format. A family has a file of its own, or a line in a table `families`:

- `json_calls`: JSON objects with name and arguments, mostly between markers;
- `json_sections`: JSON in a section or message of the answer;
- `token_calls`: name and arguments apart, with special tokens between them;
- `xml_calls`: tags, or keys and values;
- `python_calls`: calls of Python functions;
- `channels`: messages of several channels, and forms of their own.

`interface` says what a family is, `registry` has all by name, `grammar_rules` helps to write their grammars.
"""

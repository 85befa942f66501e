"""Families with messages of several channels in their answers, and families with a form of their own.

`openai` reads harmony, the messages of gpt-oss. `gemma4` and `functiongemma` write calls as objects in braces, which
`brace_call` reads.
"""

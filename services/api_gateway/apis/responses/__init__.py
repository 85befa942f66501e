"""OpenAI's /v1/responses: items in, items out. `stored_responses/` keeps them.

    schemas.py          the Struct of a body, and the checks of fields that stand alone
    tools.py            tools of every type -> the tools that the answer may call, and their names
    input_items.py      items of the input -> the messages of a prompt
    stored_items.py     items as stored responses keep them, and read them back
    parse.py            a body -> `GenerateRequest`
    output_items.py     parts of an answer -> its items, in the order in which the model wrote them
    response_object.py  the object of an answer
    api.py              the `Api`, with the events of a streamed answer

A streamed and a whole answer are made of the same `OutputItems`, so they say the same.
"""

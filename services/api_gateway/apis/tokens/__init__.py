"""vLLM's API between a server that renders requests and one that generates: token ids in, token ids out.

    schemas.py    the fields of /inference/v1/generate, which are also those of a rendered request
    parse.py      these fields -> a `GenerateRequest`
    api.py        answers, whole and streamed
    rendered.py   a checked request of another API and its token ids -> a rendered request

A rendered request, sent to /inference/v1/generate as it is, has the answer of the request that it was made of, but for
the parts (calls, reasoning) that only the other API reads. Imports go from `api` to `parse` and `schemas`, and from
`rendered` to `schemas`.
"""

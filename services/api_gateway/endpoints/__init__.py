"""The HTTP handlers, each class with its routes and the access each route needs.

`generation` has the OpenAI routes and tokenize/detokenize, `pooling` vectors, scores and classes, `status` health,
models, the ring and the playground, `operations` pause, sleep and cache reset, `documents` the description of all of
them in OpenAPI's form.

To add an endpoint: write the handler in the class it belongs to and add its line to that class's `routes()`; a new
class is one more entry in `server.build_app`.
"""

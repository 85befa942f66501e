"""From decoded fields to a checked `PoolingRequest`, for models that make vectors, scores and classes. No sockets.

`schemas` has the fields of each endpoint, `text_inputs` reads texts, ids and pairs, and `validate` the other fields.
What the offline API checks too is in `shared/ring_client/pooling/request_checks`.
"""

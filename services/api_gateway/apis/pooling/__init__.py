"""The endpoints of pooling models: one `PoolingApi` each, from the fields of a body to the bytes of the answer.

`interface` says what a `PoolingApi` is, `registry` lists them. `vectors` has the answers that consist of vectors, and
`scores` those of scores, ranks and labels. As in the other APIs nothing here knows sockets or the ring. To add one: its
Struct and its parsing in `requests/pooling`, its answer here, and a line in `registry`.
"""

"""The steps that every HTTP request passes before and after its endpoint.

`connections` bounds open connections, `middleware` assigns request ids, checks keys and content types, answers CORS
preflights and turns errors into OpenAI's error body. `access` decides which key a route needs (`Access`, `Guard`).
`uploads` reads request bodies within bounds on size, time and the sum of all bodies. `request_context` holds the
request's id and tenant for the task that serves it.
"""

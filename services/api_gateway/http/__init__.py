"""The steps that every HTTP request passes before and after its endpoint.

`connections` bounds open connections, `middleware` assigns request ids, checks keys and content types, answers CORS
preflights and turns errors into OpenAI's error body. `access` decides which key a route needs (`Access`, `Guard`).
`uploads` reads request bodies within bounds on size, time and the sum of all bodies. `request_context` holds the
request's id and tenant for the task that serves it. `user_middleware` puts the middleware of --middleware around all
of these; for classes of ASGI, `asgi_answer` makes an exchange of a request, and `asgi_gateway` a request of one.
"""

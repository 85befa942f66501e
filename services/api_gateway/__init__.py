"""HTTP, OpenAI schemas, server-sent events and the journal of open streams."""

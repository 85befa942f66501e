"""From the text deltas of a request's choices to the bytes of its HTTP answer.

`HttpGeneration` is one HTTP request in the ring. Each of its choices has a sink for its text: an `EventStream` if the
answer is streamed, or a `CollectedChoice` (`full_response`). An `Api` of `apis/` writes both as bytes. All event
streams of an answer share one `ResponseWriter`, which never waits for the client. `StreamedResponses` sweeps the open
writers, and `UnreadText` bounds the memory of text that clients have not read.
"""

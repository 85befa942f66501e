"""From the text deltas of a request's choices to the bytes of its HTTP answer.

`HttpGeneration` is one HTTP request in the ring. Its choices feed an `EventStream` each (streamed; encoded by `chunks`)
or a `CollectedChoice` each (`full_response`). An `EventStream` writes to the answer's `ResponseWriter`, which never
waits for the client; `UnreadText` bounds what slow clients have not read, and `Streams` sweeps the open writers.
"""

"""A batch: requests from a file in place of connections, through the same parsing and the same pipeline.

    batch_lines.py     a line of the input -> a request or the line's error; an answer -> a line of the output
    batch_files.py     reading lines of bounded size; appending whole lines
    line_records.py    which lines the output has, and which `custom_id` was read, kept on the disk
    batch_run.py       a bounded number of lines at a time, repeated where the ring is busy
    batch_service.py   the gateway's process with a batch in place of listening sockets

The launcher (`services/launcher/batches`) fetches the input and sends the output where they are URLs, and ends the ring
with the batch. A gateway that is killed is started again and goes on: the output has the answered lines.
"""

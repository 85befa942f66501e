"""Files and batches over HTTP (`--batch-dir`): what is stored, and the loop that answers the batches.

    objects.py    the objects of OpenAI's API for files and batches
    store.py      their records in SQLite, and the files themselves, in one folder that all gateways of a host share
    jobs.py       takes batches that no other gateway runs, and answers their lines with a `BatchRun`

A batch belongs to the gateway that holds the lock of its file in `locks/`. The kernel frees the lock of a process that
is killed, and any gateway goes on behind the last line that the output has. `endpoints/batches.py` and
`endpoints/files.py` serve the objects.
"""

"""`blockyard run-batch`: a ring that ends with its batch.

`run_batch` starts a ring with one gateway that reads a file (`services/api_gateway/batches`). `remote_files` fetches an
input and sends an output whose place is a URL. A gateway that is killed in between is started again and leaves out what
the output has: without --resume, `run_batch` begins with an empty output.
"""

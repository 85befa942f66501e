"""`blockyard bench pd`: one prefill and one decode worker, compared with one and two unified workers.

`deployments` lists the servers and which figures each gives, `measures` takes the figures of one running server,
`trial_log` keeps goodput trials of several runs in a file, `rows` compares figures with bars, and `command` runs the
servers one after another and prints the table.
Imports: `suite.served` and `suite.shapes` for servers and models, and modules of `bench` outside of `suite`.
"""

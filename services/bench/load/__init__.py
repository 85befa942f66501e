"""The load generator: sends HTTP requests on time and records when each byte of a stream arrives.

`processes.run` spreads a plan over client processes (`client_process`); each runs `client`, which only records.
`http_response` and `results` read the recordings once the run is over. `monitor` watches the generator's own CPU time.

Imports: `shared` only.
"""

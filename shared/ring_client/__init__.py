"""A client of the ring: its open requests, their recovery, and the models it may ask for.

API gateways and the offline API each own one `RingClient` (client.py), which routes frames and membership events to
the parts. `Schedulers` knows the models, their schedulers and the capacity of their queues; `TokenizerClient`
tokenizes; `Journal` records the open requests and their output, and recovery/ sends them again after a failure;
`Fanout` delivers text and vectors to them; pooling/ asks for vectors of many texts; request_fields/ checks fields that
HTTP and offline requests share; metrics/ counts.

Imports: client -> pooling -> fanout -> recovery -> metrics -> journal; nothing here imports a service.
"""

"""A client of the ring: its open requests, their recovery, and the models it may ask for.

API gateways and the offline API each own one `RingClient` (client.py), which routes frames and membership events to
the parts. `Admission` knows the models, their schedulers and the capacity of their queues; `TokenizerClient` tokenizes;
recovery/ keeps the journal of open requests and sends them again after a failure; request_fields/ checks fields that
HTTP and offline requests share; metrics/ counts. Imports go from client to the parts; nothing here imports a service.
"""

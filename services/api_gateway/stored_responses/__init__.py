"""Stored responses of /v1/responses: their items, how long they are kept, and how another gateway gets them.

    response_store.py    the interface of the two stores, and the errors of responses that are not there
    memory_store.py      responses in memory, within bounds
    disk_store.py        responses in SQLite (`--response-store`), in one folder that all gateways of a host share
    event_log.py         the numbered events of a background response, for streams that begin or go on later
    background.py        background responses: generated without a connection
    other_gateways.py    queries to the gateway that keeps a response
    local_responses.py   what this gateway keeps: a store, and the background responses that run
    stored_responses.py  all of these for the endpoints: read, continue, cancel, delete, by the id of a response

The id of a response names the gateway that keeps it, and it belongs to the API key that made it. A response is kept
with its own input; with `previous_response_id` it is one turn of a conversation, which is read turn by turn. Each use
renews the time of a response and of all before it. `endpoints/stored_responses.py` serves the routes.
"""

"""`python -m blockyard.entrypoints.openai.api_server`: see `blockyard serve`."""

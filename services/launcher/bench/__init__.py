"""`blockyard bench`: measures a model offline, or any server that speaks OpenAI's protocol."""

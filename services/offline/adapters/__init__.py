"""Adapters of offline calls: each request may have one of LoRA and one of prompts.

`requests` has what callers name them by, and `loading` loads and unloads them by a `Session`, whose module imports
this package.
"""

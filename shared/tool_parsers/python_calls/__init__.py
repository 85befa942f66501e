"""Families that write calls as calls of Python functions. `literals` reads them, `call_rules` writes their grammar."""

"""Settings: one frozen struct a service, and the flags they are made from.

A service process imports its own struct's module and nothing else of this package.
"""

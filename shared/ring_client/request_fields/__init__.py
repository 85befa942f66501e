"""Fields that HTTP requests and the offline API share: their ranges, defaults and errors.

Each module reads one group of fields into structs of `shared/messages`, and raises RequestError naming the field.
`limits` checks single values; `finalize_sampling` completes Sampling once the prompt's length is known.
"""

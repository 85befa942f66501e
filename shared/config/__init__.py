"""Settings: one frozen struct a service (services/), and the flags they are made from (flags/, listed in FLAGS.md).

A service process imports its own struct's module and nothing else of this package. The launcher and the offline API
parse flags (`parsed_flags`) and turn them into all the structs of a ring (`resolve`).

To add a flag:
1. Declare it with its help text in the module of its group in flags/.
2. Add a field with a default to the struct of the service that uses it, in services/.
3. Name the flag's field in `resolve`, or in the module that resolve calls for this group.
4. Run `blockyard flags --write shared/config/FLAGS.md`.
5. Test the flag's effect where it is used: tests/shared/config checks the declaration.
"""

"""Settings: one frozen struct a service (services/), and the flags they are made from (flags/, listed in FLAGS.md).

A service process imports its own struct's module and nothing else of this package. The launcher and the offline API
parse flags (`parsed_flags`) and turn them into all the structs of a ring (`resolve`).

To add a flag:
1. Add a field with a default to the struct of the service that uses it, in services/.
2. Declare the flag with its help text in the module of its group in flags/; `to` names the field.
3. If the field's value depends on more than this flag, compute it in `resolve`.
4. Run `blockyard flags --write shared/config/FLAGS.md`.
5. Test the flag's effect where it is used: tests/shared/config checks the declaration.
"""

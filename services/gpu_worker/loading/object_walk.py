"""Finds all objects that an object of this project holds."""

from collections.abc import Iterator

_OURS = "blockyard."


def reachable(owner: object) -> Iterator[object]:
    """`owner`, what its fields and collections hold, and so on; each object once.

    Objects of other projects are yielded, but their fields are not searched.
    """
    seen: set[int] = set()
    rest = [owner]
    while rest:
        thing = rest.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        yield thing
        if isinstance(thing, dict):
            rest.extend(thing.values())
        elif isinstance(thing, list | tuple | set | frozenset):
            rest.extend(thing)
        elif type(thing).__module__.startswith(_OURS):
            rest.extend(_fields(thing))


def _fields(thing: object) -> Iterator[object]:
    yield from getattr(thing, "__dict__", {}).values()
    for kind in type(thing).__mro__:
        for name in getattr(kind, "__slots__", ()):
            if hasattr(thing, name):
                yield getattr(thing, name)

"""Counters of a ring client and of all members, and the metric families in which they are exposed.

`Meters` counts this client's requests; `MemberCounts` sums the counters of all members, present and gone.
"""

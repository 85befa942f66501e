"""Raises the limit on open files at the start of each process: each connection and link takes descriptors."""

import resource

MOST = 2**20  # macOS and old kernels refuse more; no process needs them


def raise_limit() -> int:
    """Raises the soft limit to the hard one if the system allows it. Returns the soft limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):  # a sandbox may forbid it
            return soft
        return wanted
    return MOST if soft == resource.RLIM_INFINITY else soft

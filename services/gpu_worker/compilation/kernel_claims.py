"""Which rank of a host compiles a kernel that several ranks need: the first that asks. Imports no Triton."""

from pathlib import Path


class KernelClaims:
    """Ranks that start together record about the same kernels, and read each other's binaries from Triton's cache.

    A claim is a file, which Linux creates for one process. A rank may launch what another compiles once all ranks have
    waited for their own kernels and met behind that. A kernel whose rank fails is compiled at its first launch.
    """

    def __init__(self, folder: Path) -> None:
        """folder: private to the ranks of this host and this start; made if it is not there."""
        self._folder = folder
        folder.mkdir(exist_ok=True)

    def take(self, digest: str) -> bool:
        """Whether this rank compiles the kernel. False: another does, or this one has taken it before."""
        try:
            (self._folder / digest).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

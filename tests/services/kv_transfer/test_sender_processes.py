"""Ends of senders' processes are found, and every descriptor is closed."""

import os
import subprocess
import sys

import pytest

from blockyard.services.kv_transfer.sender_processes import SenderProcesses


def start() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)


def num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_process_that_has_ended_is_found_once() -> None:
    before, processes, children = num_open(), SenderProcesses(), [start(), start()]
    with children[0], children[1]:
        for sender, child in enumerate(children):
            processes.add(sender, child.pid)
        assert processes.take_ended() == []
        children[1].kill()
        children[1].wait()
        assert processes.take_ended() == [1]
        assert processes.take_ended() == []
        assert 0 in processes and 1 not in processes
        processes.drop(1)  # it is dropped already
        processes.close()
        assert 0 not in processes
        children[0].kill()
    assert num_open() == before


def test_a_new_process_of_a_sender_replaces_the_first_one() -> None:
    before, processes, children = num_open(), SenderProcesses(), [start(), start()]
    with children[0], children[1]:
        for child in children:
            processes.add(5, child.pid)
        children[0].kill()
        children[0].wait()
        assert processes.take_ended() == []
        with pytest.raises(OSError):
            processes.add(5, children[0].pid)
        assert 5 not in processes
        children[1].kill()
    assert num_open() == before

"""A process that forks while it serves a store."""

import os
import re
import socket
import time

import cdist


def watched():
    """Sockets in the epolls of this process."""
    count = 0
    for number in os.listdir("/proc/self/fd"):
        try:
            with open(f"/proc/self/fdinfo/{number}") as info:
                count += len(re.findall(r"^tfd:", info.read(), re.MULTILINE))
        except OSError:  # the descriptor of the listing itself
            continue
    return count


def wait_until(condition, seconds=10):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def test_a_connection_that_a_fork_keeps_open_is_forgotten():
    """Otherwise the epoll goes on to report a connection whose memory is free."""
    server = cdist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    before = watched()
    client = socket.create_connection(("127.0.0.1", server.port))
    assert wait_until(lambda: watched() == before + 1)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        client.close()
        os.read(reader, 1)  # until the parent is done
        os._exit(0)
    try:
        client.close()
        assert wait_until(lambda: watched() == before)
        server.set("key", b"value")
        assert server.get("key") == b"value"
    finally:
        os.close(writer)
        os.close(reader)
        os.waitpid(child, 0)

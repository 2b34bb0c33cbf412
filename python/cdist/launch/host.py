"""The store that the launcher of node 0 hosts for all ranks, so that it outlives any of them."""

import socket


class HostError(RuntimeError):
    """The store cannot be hosted or reached; the text says why."""


class StoreHost:
    """Holds the listening socket from the start, so that workers can be started before the server is up."""

    def __init__(self, address, port, several_nodes):
        self.socket = _listen(address, port, several_nodes)
        self.port = self.socket.getsockname()[1]
        self._address = address
        self._store = None

    def serve(self):
        """Start the server on the socket."""
        from datetime import timedelta

        from cdist import TCPStore

        self._store = TCPStore(
            self._address,
            self.port,
            None,
            True,
            timedelta(seconds=300),
            False,
            master_listen_fd=self.socket.detach(),
        )

    def close(self):
        """Stop the server."""
        self._store = None
        self.socket.close()


def _listen(address, port, several_nodes):
    try:
        found = _resolve(address, port)
    except OSError as error:
        raise HostError(f"--master-addr {address}: {error.strerror or error}") from None
    family, kind, protocol, _, bound = found[0]
    is_loopback = bound[0].startswith("127.") or bound[0] == "::1"
    if several_nodes and is_loopback and address not in ("localhost", bound[0]):
        # A host name that means loopback on this very host only.
        bound = ("::" if family == socket.AF_INET6 else "0.0.0.0", *bound[1:])
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(bound)
        listener.listen(4096)
    except OSError as error:
        listener.close()
        raise HostError(
            f"cannot listen on {address}:{port}: {error.strerror}; choose another --master-port "
            "(or none, where there is one node)"
        ) from None
    return listener


def _resolve(address, port):
    try:  # numbers, as bytes, need neither the resolver's files nor Python's tables for names
        return socket.getaddrinfo(
            address.encode(), port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )
    except socket.gaierror:
        return socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)


def is_ephemeral(port):
    """Tell whether the kernel may give the port to any outgoing connection."""
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
            low, high = map(int, file.read().split())
    except (OSError, ValueError):
        return False
    return low <= port <= high

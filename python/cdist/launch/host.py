"""The store that the launcher of node 0 hosts for all ranks, so that it outlives any of them."""

import errno
import socket

# A server in this very process answers at once; a loaded machine may take a while.
ANSWER_SECONDS = 30


class HostError(RuntimeError):
    """The store cannot be hosted or reached; the text says why."""


class StoreHost:
    """Holds the listening socket from the start, so that workers can be started before the server is up."""

    def __init__(self, address, port, several_nodes):
        self._address, self.port = address, port
        self._store = self._socket = None
        if several_nodes:  # which addresses other hosts reach, the server itself finds out
            self.serve()
        else:
            self._socket = _listen(address, port)
            self.port = self._socket.getsockname()[1]

    def serve(self):
        """Start the server, if it does not run yet."""
        if self._store is not None:
            return
        from cdist import DistNetworkError, TCPStore

        fd = self._socket.detach() if self._socket else None
        try:
            self._store = TCPStore(
                self._address, self.port, None, True, ANSWER_SECONDS, False, master_listen_fd=fd
            )
        except DistNetworkError as error:
            raise HostError(f"--node-rank 0 belongs on the host that --master-addr names: {error}") from None
        self.port = self._store.port

    def close(self):
        """Stop the server."""
        self._store = None
        if self._socket:
            self._socket.close()


def _listen(address, port):
    try:
        found = _resolve(address, port)
    except OSError as error:
        raise HostError(f"--master-addr {address}: {error.strerror or error}") from None
    family, kind, protocol, _, bound = found[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(bound)
        listener.listen(4096)
    except OSError as error:
        listener.close()
        remedy = "choose another --master-port (or none, where there is one node)"
        if error.errno == errno.EADDRNOTAVAIL:
            remedy = "--master-addr names an address of this host (::1 where it has no IPv4)"
        raise HostError(f"cannot listen on {address}:{port}: {error.strerror}; {remedy}") from None
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

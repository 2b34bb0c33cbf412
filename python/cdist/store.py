"""Key-value stores: how processes find each other and agree. The names and meanings of torch.distributed."""

from cdist._core import FileStore, HashStore, PrefixStore, Store, TCPStore

__all__ = ["Store", "TCPStore", "FileStore", "HashStore", "PrefixStore", "DEFAULT_PORT"]

DEFAULT_PORT = 29500

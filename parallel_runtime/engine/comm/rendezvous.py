"""Rendezvous through a store that the host has made: first of the torchruns, whose node ranks are fixed, then of ranks.

torchrun's own rendezvous of several machines unpickles whatever lies in its store.
"""

from __future__ import annotations

import os

from torch.distributed import FileStore, PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

NAME = "cp-store"  # as in group/torchrun.py


def store_at(place: str, prefix: str) -> Store:
    """Returns the store at `place`: a private file on one machine, so that no port is opened; host:port on several
    machines. `prefix` is that of the keys."""
    if os.path.isabs(place):
        return PrefixStore(prefix, FileStore(place))
    host, _, port = place.rpartition(":")
    return PrefixStore(prefix, TCPStore(host, int(port), is_master=False))


class StoreRendezvous(StaticTCPRendezvous):
    """torchrun's static rendezvous of machines with fixed node ranks, in a store that is already open."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        super().__init__("", 0, int(parameters.config["machine"]), parameters.max_nodes, parameters.run_id, timeout=0)
        self._place = parameters.endpoint

    def get_backend(self) -> str:
        return NAME

    def next_rendezvous(self) -> RendezvousInfo:
        unused = RendezvousStoreInfo("", 0)  # only for ranks that read torchrun's variables
        return RendezvousInfo(store_at(self._place, "machines"), self.rank, self.world_size, unused)


def register() -> None:
    """Registers the rendezvous with torchrun under NAME."""
    rendezvous_handler_registry.register(NAME, StoreRendezvous)

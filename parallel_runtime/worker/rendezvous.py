"""Where a group meets: in a store that the host has made, first its torchruns, each told its number, then their ranks.

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

NAME = "told"


def store_at(place: str, who: str) -> Store:
    """`place` is a private file on one machine, so that meeting opens no port; host:port on several. Keys are those of
    `who` meets."""
    if os.path.isabs(place):
        return PrefixStore(who, FileStore(place))
    host, _, port = place.rpartition(":")
    return PrefixStore(who, TCPStore(host, int(port), is_master=False))


class Told(StaticTCPRendezvous):
    """torchrun's own for machines that know their numbers, but in a store that is open already."""

    def __init__(self, told: RendezvousParameters) -> None:
        super().__init__("", 0, int(told.config["machine"]), told.max_nodes, told.run_id, timeout=0)
        self._place = told.endpoint

    def get_backend(self) -> str:
        return NAME

    def next_rendezvous(self) -> RendezvousInfo:
        nowhere = RendezvousStoreInfo("", 0)  # for ranks that meet by torchrun's variables
        return RendezvousInfo(store_at(self._place, "machines"), self.rank, self.world_size, nowhere)


def register() -> None:
    """Let torchrun know the rendezvous, under NAME."""
    rendezvous_handler_registry.register(NAME, Told)

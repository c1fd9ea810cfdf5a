"""What differs between networks: one small file each, and one line here. Imports no torch.

A network is known by its class. One without a plan runs undivided.
"""

from __future__ import annotations

from . import (
    boogu,
    chroma,
    cogvideox,
    cosmos,
    ernie_image,
    flux,
    hidream,
    hunyuan_video,
    joyimage,
    kandinsky5,
    krea2,
    lens,
    ltxv,
    lumina,
    omnigen2,
    qwen_image,
    sd3,
    wan,
)  # fmt: skip
from .network import Network

__all__ = ["NETWORKS", "Network", "network_of"]

NETWORKS: tuple[Network, ...] = (
    boogu.NETWORK, chroma.NETWORK, cogvideox.NETWORK, cosmos.NETWORK, ernie_image.NETWORK, flux.NETWORK,
    hidream.NETWORK, hunyuan_video.NETWORK, joyimage.NETWORK, kandinsky5.NETWORK, krea2.NETWORK, lens.NETWORK,
    ltxv.LTXV, ltxv.LTXAV, lumina.NETWORK, omnigen2.NETWORK, qwen_image.NETWORK, sd3.NETWORK, wan.NETWORK, wan.VACE,
)  # fmt: skip
_BY_CLASS = {kind: network for network in NETWORKS for kind in network.kinds}


def network_of(network: object) -> Network | None:
    """The plan and the figures of a network's class; None for one without a plan.

    A subclass is another class, whatever it changes: nobody has compared it with the plan.
    """
    kind = type(network)
    return _BY_CLASS.get(f"{kind.__module__}:{kind.__qualname__}")

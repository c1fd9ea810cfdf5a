"""What differs between networks: one small file each, and one line here. Imports no torch.

A network is known by its class. One without a plan runs undivided.
"""

from __future__ import annotations

from . import (
    ace_step15,
    aura_flow,
    boogu,
    chroma,
    cogvideox,
    cosmos,
    cosmos1,
    ernie_image,
    flux,
    hidream,
    hidream_o1,
    hunyuan_dit,
    hunyuan_video,
    ideogram4,
    joyimage,
    kandinsky5,
    krea2,
    lens,
    ltxv,
    lumina,
    minimax_h3,
    minimax_music,
    mochi,
    omnigen2,
    pixart,
    pixeldit,
    qwen_image,
    sd3,
    stable_audio,
    wan,
)  # fmt: skip
from .network import Network

__all__ = ["NETWORKS", "Network", "network_of"]

NETWORKS: tuple[Network, ...] = (
    ace_step15.NETWORK, aura_flow.NETWORK, boogu.NETWORK, chroma.NETWORK, chroma.RADIANCE, cogvideox.NETWORK,
    cosmos.NETWORK, cosmos1.NETWORK, ernie_image.NETWORK, flux.NETWORK, hidream.NETWORK, hidream_o1.NETWORK,
    hunyuan_dit.NETWORK, hunyuan_video.NETWORK, ideogram4.NETWORK, joyimage.NETWORK, kandinsky5.NETWORK,
    krea2.NETWORK, lens.NETWORK, ltxv.LTXV, ltxv.LTXAV, lumina.NETWORK, lumina.PIXELS, qwen_image.MAGE_FLOW,
    minimax_h3.NETWORK, minimax_music.NETWORK, mochi.NETWORK, omnigen2.NETWORK, pixart.NETWORK, pixeldit.PIXELDIT,
    pixeldit.PID, qwen_image.NETWORK, sd3.NETWORK, stable_audio.NETWORK, wan.NETWORK, wan.VACE,
    wan.ANIMATE, wan.S2V, wan.HUMO, wan.DANCER,
)  # fmt: skip
_BY_CLASS = {kind: network for network in NETWORKS for kind in network.kinds}


def network_of(network: object) -> Network | None:
    """The plan and the figures of a network's class; None for one without a plan.

    A subclass is another class, whatever it changes: nobody has compared it with the plan.
    """
    kind = type(network)
    found = _BY_CLASS.get(f"{kind.__module__}:{kind.__qualname__}")
    return found if found is not None and found.fits(network) else None

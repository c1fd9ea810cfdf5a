"""torchrun's c10d rendezvous for several machines: what torchrun would unpickle must carry our signature.

Its store answers whoever reaches it; only who has the key can write a state that a torchrun of ours reads.
"""

from __future__ import annotations

import hmac

from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousParameters,
    RendezvousStateError,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token, create_handler

NAME = "signed-c10d"
SIGNATURE_BYTES = 32


class SignedBackend(RendezvousBackend):
    """Signs every state that it writes, and raises RendezvousStateError for one that is not signed for this run."""

    def __init__(self, inner: RendezvousBackend, run_id: str, key: str) -> None:
        self._inner = inner
        self._run = run_id.encode()
        self._key = key.encode()

    @property
    def name(self) -> str:
        return NAME

    def get_state(self) -> tuple[bytes, Token] | None:
        found = self._inner.get_state()
        return found and (self._opened(found[0]), found[1])

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        found = self._inner.set_state(self._signature(state) + state, token)
        return found and (self._opened(found[0]), *found[1:])

    def _opened(self, signed: bytes) -> bytes:
        signature, state = signed[:SIGNATURE_BYTES], signed[SIGNATURE_BYTES:]
        if not hmac.compare_digest(signature, self._signature(state)):
            raise RendezvousStateError("somebody without the token has written to the rendezvous")
        return state

    def _signature(self, state: bytes) -> bytes:
        return hmac.digest(self._key, self._run + state, "sha256")


def register(key: str) -> None:
    """Let torchrun know the rendezvous, under NAME."""

    def create(parameters: RendezvousParameters) -> RendezvousHandler:
        backend, store = create_backend(parameters)
        return create_handler(store, SignedBackend(backend, parameters.run_id, key), parameters)

    rendezvous_handler_registry.register(NAME, create)

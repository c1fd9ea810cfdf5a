"""Where other machines and their ranks come in: one port at the address that the user named, behind the token."""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading

from ..wire.handshake import prove
from ..wire.stream import CONNECT_SECONDS, Stream
from .endpoint import listen

MOST_AT_A_TIME = 16

log = logging.getLogger(__name__)


class Gate:
    """Who has shown the token is in `arrivals`; who has not is shown the door, and named in the log."""

    def __init__(self, address: str, port: int, key: str) -> None:
        self.arrivals: queue.SimpleQueue[Stream] = queue.SimpleQueue()
        self._key = key
        self._open = True
        self._refused: set[str] = set()
        self._places = threading.BoundedSemaphore(MOST_AT_A_TIME)
        self._server = listen(address, port)
        self._thread = threading.Thread(target=self._listen, name="gate", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._open = False
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._server.close()
        with contextlib.suppress(queue.Empty):
            while True:
                self.arrivals.get_nowait().close()

    def _listen(self) -> None:
        while self._open:
            try:
                sock, (address, _) = self._server.accept()
            except OSError:
                continue
            if self._places.acquire(blocking=False):
                threading.Thread(target=self._admit, args=(sock, address), daemon=True).start()
            else:
                sock.close()

    def _admit(self, sock: socket.socket, address: str) -> None:
        try:
            sock.settimeout(CONNECT_SECONDS)
            if prove(sock, self._key, host=True):
                self.arrivals.put(Stream(sock))
                return
            self._refuse(address, "its token is not the one of this machine")
        except (OSError, EOFError):
            self._refuse(address, "it showed no token")
        finally:
            self._places.release()
        sock.close()

    def _refuse(self, address: str, reason: str) -> None:
        """Said once an address: it may knock every second."""
        if address not in self._refused:
            log.warning("[CP] %s was refused: %s", address, reason)
        self._refused.add(address)

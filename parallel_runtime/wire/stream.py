"""A Channel to another machine: the same messages over TCP, behind a token. It carries no bundles.

The kernel asks after a silent other end, so that a machine that is gone becomes an error within SILENCE_SECONDS. A
message that has begun is whole within as many, or the other end counts as gone: who waits hears no cancel meanwhile.
"""

from __future__ import annotations

import select
import socket
import time

from ..errors import ProtocolError
from .channel import PACKET_BYTES, Channel, ready
from .handshake import prove, receive_exactly
from .messages import Message, decode, encode

SILENCE_SECONDS = 8
CONNECT_SECONDS = 5.0
LENGTH_BYTES = 4


class Stream(Channel):
    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SILENCE_SECONDS)

    @classmethod
    def call(cls, address: str, key: str) -> Stream:
        """Connect to host:port. Raises OSError where nobody listens, ConnectionAbortedError where who listens hangs
        up before it asks for the token, and EOFError where the token is another."""
        host, _, port = address.rpartition(":")
        sock = socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS)
        try:
            if not prove(sock, key, host=False):
                raise EOFError
        except BaseException:
            sock.close()
            raise
        return cls(sock)

    @property
    def addresses(self) -> tuple[str, str]:
        """Returns the address of this end and that of the other one."""
        return self._socket.getsockname()[0], self._socket.getpeername()[0]

    def receive(self) -> tuple[Message, None]:
        try:
            ready(self._socket, select.POLLIN, None)
            deadline = time.monotonic() + SILENCE_SECONDS
            size = int.from_bytes(receive_exactly(self._socket, LENGTH_BYTES, deadline), "big")
            if size > PACKET_BYTES:
                raise ProtocolError(f"a message over {PACKET_BYTES} bytes")
            return decode(receive_exactly(self._socket, size, deadline)), None
        except OSError:  # the kernel gave the other side up, or it stopped in the middle
            raise EOFError from None

    def _send(self, message: Message, bundle: int | None, flags: int) -> None:
        assert bundle is None, "a bundle stays on its machine"
        data = encode(message)
        assert len(data) <= PACKET_BYTES, f"{type(message).__name__} of {len(data)} bytes"
        if flags & socket.MSG_DONTWAIT and not ready(self._socket, select.POLLOUT, 0):
            raise BlockingIOError
        self._socket.sendall(len(data).to_bytes(LENGTH_BYTES, "big") + data)

"""One socket between the host and one rank. When either end goes away the other sees EOF.

A message is one packet of JSON; a bundle goes along as a file descriptor (SCM_RIGHTS). Knows no message by name.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import threading
from collections.abc import Iterator
from typing import Any, TypeVar

from ..errors import ProtocolError
from .messages import PACKET_BYTES, Message, decode, encode

Kind = TypeVar("Kind")


class Channel:
    """A socket to the other process. Several threads may send; one more may wait for the hang-up meanwhile."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._sending = threading.Lock()

    @classmethod
    def connect(cls, path: str) -> Channel:
        """Connects to a unix socket. Raises OSError where nobody listens."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with short_path(path) as address:
            sock.connect(address)
        return cls(sock)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message, bundle: int | None = None) -> None:
        """Sends, waiting for room. Closes `bundle`. Raises OSError if the other side is gone."""
        self._send(message, bundle, 0)

    def offer(self, message: Message, bundle: int | None = None) -> bool:
        """Sends if there is room, else drops the message: for what the next message makes old. Closes `bundle`."""
        try:
            self._send(message, bundle, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        return True

    def _send(self, message: Message, bundle: int | None, flags: int) -> None:
        data = encode(message)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [bundle]))] if bundle is not None else []
        try:
            with self._sending:
                self._socket.sendmsg([data], rights, flags | socket.MSG_NOSIGNAL)
        finally:
            if bundle is not None:
                os.close(bundle)

    def receive(self) -> tuple[Any, int | None]:
        """Returns the next message, and its bundle, which the caller must read or close. Blocks.

        Raises EOFError when the other side is gone, ProtocolError for what is no message.
        """
        try:
            data, rights, flags, _ = self._socket.recvmsg(PACKET_BYTES, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:
            raise EOFError from None
        bundles = array.array("i")
        for level, kind, content in rights:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                bundles.frombytes(content[: len(content) - len(content) % bundles.itemsize])
        if not data and not bundles:
            raise EOFError
        try:
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or len(bundles) > 1:
                raise ProtocolError(f"a message over {PACKET_BYTES} bytes, or with several bundles")
            return decode(data), bundles[0] if bundles else None
        except ProtocolError:
            for bundle in bundles:
                os.close(bundle)
            raise

    def greeting(self, kind: type[Kind], seconds: float) -> Kind | None:
        """Returns the first message, without a bundle; None where it does not come, or is of another kind."""
        if self.waiting(seconds):
            with contextlib.suppress(EOFError, OSError, ProtocolError):
                message, bundle = self.receive()
                if bundle is not None:
                    os.close(bundle)
                return message if isinstance(message, kind) else None
        return None

    def waiting(self, seconds: float = 0.0) -> bool:
        """Returns whether there is something to receive, a message or EOF, within this many seconds."""
        return ready(self._socket, select.POLLIN, seconds)

    def hung_up(self, seconds: float | None = None) -> bool:
        """Returns whether the other side is gone, or this one closed, within this many seconds; None: waits for it.
        Messages stay where they are."""
        return ready(self._socket, select.POLLRDHUP, seconds)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def ready(sock: socket.socket, events: int, seconds: float | None) -> bool:
    """Returns whether one of poll's `events` comes within `seconds`; None: waits for it. True also on hang-up: the next
    receive() then raises EOFError. select.select takes no descriptor above 1,023."""
    poll = select.poll()
    try:
        poll.register(sock, events)
    except ValueError:  # closed here, maybe on another thread
        return True
    return bool(poll.poll(None if seconds is None else max(0.0, 1000 * seconds)))


@contextlib.contextmanager
def short_path(path: str) -> Iterator[str]:
    """Yields the `path` of a unix socket under a name that fits into the 108 bytes that the kernel has for it."""
    if len(os.fsencode(path)) < 100:
        yield path
        return
    folder = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{os.path.basename(path)}"
    finally:
        os.close(folder)

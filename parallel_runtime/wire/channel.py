"""One socket between the host and one rank. When either end goes away the other sees EOF.

On one machine a message is one packet of JSON; a bundle goes along as a file descriptor (SCM_RIGHTS). Knows no message
by name.

A TcpChannel is one to another machine: the same messages over TCP, between ends that know one token. It carries no
bundles. Each end answers a random challenge of the other with an HMAC of the token, which is never sent. What follows
is neither encrypted nor signed: whoever can change packets on the way can take the connection over."""

from __future__ import annotations

import array
import contextlib
import hashlib
import hmac
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from ..errors import ProtocolError, Refused
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

        Raises EOFError when the other side is gone, ProtocolError for what is no message."""
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
    receive() then raises EOFError."""
    # select.select takes no descriptor above 1,023.
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


SILENCE_SECONDS = 8
CONNECT_SECONDS = 5.0
HANDSHAKE_SECONDS = 5.0
LENGTH_BYTES = 4
TOKEN_FILE = "CP_CLUSTER_TOKEN_FILE"
TOKEN = "CP_CLUSTER_TOKEN"
KEY = "CP_CLUSTER_KEY"  # from the process that read the token to the ranks that it starts
MIN_TOKEN_BYTES = 16
CHALLENGE_BYTES = PROOF_BYTES = 32


class TcpChannel(Channel):
    """A connected socket whose other end has proved that it knows the token."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        sock.settimeout(None)
        # The kernel asks after a silent other end: a machine that is gone becomes an error within SILENCE_SECONDS.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SILENCE_SECONDS)

    @classmethod
    def call(cls, address: str, key: str) -> TcpChannel:
        """Connects to host:port. Raises OSError where nobody listens, ConnectionAbortedError where who listens hangs
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
            # Of a message that has begun: who waits for the rest of it hears no cancel meanwhile.
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
        with self._sending:
            # Dropped before it begins or not at all: half a message would break the stream.
            if flags & socket.MSG_DONTWAIT and not ready(self._socket, select.POLLOUT, 0):
                raise BlockingIOError
            self._socket.sendall(len(data).to_bytes(LENGTH_BYTES, "big") + data)


def read_key(path: str | None = None) -> str:
    """Returns a key made of the token in the file at `path`, else of what the environment names. Raises Refused."""
    path = path or os.environ.get(TOKEN_FILE)
    try:
        token = Path(path).expanduser().read_bytes().strip() if path else os.environ.get(TOKEN, "").encode()
    except OSError as error:
        raise Refused("token.file", path=str(path), error=error.strerror) from None
    if len(token) < MIN_TOKEN_BYTES:
        count = f"{len(token)} characters" if token else "none"
        raise Refused("token.short", least=MIN_TOKEN_BYTES, count=count, variable=TOKEN_FILE)
    return hashlib.sha256(token).hexdigest()


def prove(sock: socket.socket, key: str, *, host: bool) -> bool:
    """Returns whether the other end has `key`, and shows it that this one has. Raises EOFError where the other end
    hangs up once it could judge our key, ConnectionAbortedError where it does before, TimeoutError after
    HANDSHAKE_SECONDS in all, and OSError."""
    deadline = time.monotonic() + HANDSHAKE_SECONDS
    local_challenge = secrets.token_bytes(CHALLENGE_BYTES)
    sock.sendall(local_challenge)
    try:
        remote_challenge = receive_exactly(sock, CHALLENGE_BYTES, deadline)
    except EOFError:
        raise ConnectionAbortedError("hung up before it asked for the token") from None
    both = local_challenge + remote_challenge if host else remote_challenge + local_challenge
    proofs = [hmac.digest(key.encode(), label + both, "sha256") for label in (b"host", b"guest")]
    # The end that called proves first: the one that listens proves nothing to strangers.
    if not host:
        sock.sendall(proofs[1])
        return hmac.compare_digest(receive_exactly(sock, PROOF_BYTES, deadline), proofs[0])
    if not hmac.compare_digest(receive_exactly(sock, PROOF_BYTES, deadline), proofs[1]):
        return False
    sock.sendall(proofs[0])
    return True


def receive_exactly(sock: socket.socket, size: int, deadline: float) -> bytes:
    """Reads `size` bytes. Raises EOFError if the other side ends, TimeoutError past the monotonic `deadline`."""
    parts = b""
    while len(parts) < size:
        if not ready(sock, select.POLLIN, deadline - time.monotonic()):
            raise TimeoutError(f"{len(parts)} of {size} bytes came in time")
        try:
            part = sock.recv(size - len(parts))
        except ConnectionResetError:
            raise EOFError from None
        if not part:
            raise EOFError
        parts += part
    return parts

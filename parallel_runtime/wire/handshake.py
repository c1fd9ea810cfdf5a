"""Two ends of a TCP connection show each other that they know the same token, without sending it.

Each answers a random challenge of the other with an HMAC. What follows on the connection is neither encrypted nor
signed: whoever can change packets on the way can take it over.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import select
import socket
import time
from pathlib import Path

from ..errors import Refused
from .channel import ready

TOKEN_FILE = "CP_CLUSTER_TOKEN_FILE"
TOKEN = "CP_CLUSTER_TOKEN"
KEY = "CP_CLUSTER_KEY"  # from the process that read the token to the ranks that it starts
SHORTEST = 16
CHALLENGE_BYTES = PROOF_BYTES = 32
HANDSHAKE_SECONDS = 5.0


def read_key(path: str | None = None) -> str:
    """A key from the token in the file at `path`, else in what the environment names. Raises Refused."""
    path = path or os.environ.get(TOKEN_FILE)
    try:
        token = Path(path).expanduser().read_bytes().strip() if path else os.environ.get(TOKEN, "").encode()
    except OSError as error:
        raise Refused("token.file", path=str(path), error=error.strerror) from None
    if len(token) < SHORTEST:
        count = f"{len(token)} characters" if token else "none"
        raise Refused("token.short", least=SHORTEST, count=count, variable=TOKEN_FILE)
    return hashlib.sha256(token).hexdigest()


def prove(sock: socket.socket, key: str, *, host: bool) -> bool:
    """Whether the other end has `key`; ours is told whether we do. Raises EOFError where the other end hangs up once it
    could judge our key, ConnectionAbortedError where it does before, TimeoutError after HANDSHAKE_SECONDS in all, and
    OSError.

    The end that came proves first, so that the one that listens proves nothing to strangers.
    """
    deadline = time.monotonic() + HANDSHAKE_SECONDS
    local_challenge = secrets.token_bytes(CHALLENGE_BYTES)
    sock.sendall(local_challenge)
    try:
        remote_challenge = receive_exactly(sock, CHALLENGE_BYTES, deadline)
    except EOFError:
        raise ConnectionAbortedError("hung up before it asked for the token") from None
    both = local_challenge + remote_challenge if host else remote_challenge + local_challenge
    proofs = [hmac.digest(key.encode(), label + both, "sha256") for label in (b"host", b"guest")]
    if not host:
        sock.sendall(proofs[1])
        return hmac.compare_digest(receive_exactly(sock, PROOF_BYTES, deadline), proofs[0])
    if not hmac.compare_digest(receive_exactly(sock, PROOF_BYTES, deadline), proofs[1]):
        return False
    sock.sendall(proofs[0])
    return True


def receive_exactly(sock: socket.socket, size: int, deadline: float) -> bytes:
    """Raises EOFError when the other side ends before, TimeoutError past the deadline by time.monotonic()."""
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

"""Two ends of a TCP connection show each other that they know the same token, without sending it.

Each answers a random challenge of the other with an HMAC. What follows on the connection is neither encrypted nor
signed: whoever can change packets on the way can take it over.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
from pathlib import Path

from ..errors import Refused

TOKEN_FILE = "CP_CLUSTER_TOKEN_FILE"
TOKEN = "CP_CLUSTER_TOKEN"
KEY = "CP_CLUSTER_KEY"  # from the process that read the token to the ranks that it starts
SHORTEST = 16
CHALLENGE_BYTES = PROOF_BYTES = 32


def read_key(path: str | None = None) -> str:
    """A key from the token in the file at `path`, else in what the environment names. Raises Refused."""
    path = path or os.environ.get(TOKEN_FILE)
    try:
        token = Path(path).expanduser().read_bytes().strip() if path else os.environ.get(TOKEN, "").encode()
    except OSError as error:
        raise Refused(f"the token file {path} cannot be read: {error.strerror}") from None
    if len(token) < SHORTEST:
        found = f"{len(token)} characters" if token else "none"
        raise Refused(
            f"several machines need a shared token of at least {SHORTEST} characters, found {found}; put the same text "
            f"into a file on each, and name it in {TOKEN_FILE} where ComfyUI starts, with --token-file where you join"
        )
    return hashlib.sha256(token).hexdigest()


def prove(sock: socket.socket, key: str, *, host: bool) -> bool:
    """Whether the other end has `key`; ours is told whether we do. Raises OSError or EOFError if it goes away.

    The end that came speaks first, so that the one that listens proves nothing to strangers.
    """
    mine = secrets.token_bytes(CHALLENGE_BYTES)
    sock.sendall(mine)
    theirs = receive_exactly(sock, CHALLENGE_BYTES)
    both = mine + theirs if host else theirs + mine
    proofs = [hmac.digest(key.encode(), label + both, "sha256") for label in (b"host", b"guest")]
    if not host:
        sock.sendall(proofs[1])
        return hmac.compare_digest(receive_exactly(sock, PROOF_BYTES), proofs[0])
    if not hmac.compare_digest(receive_exactly(sock, PROOF_BYTES), proofs[1]):
        return False
    sock.sendall(proofs[0])
    return True


def receive_exactly(sock: socket.socket, size: int) -> bytes:
    """Raises EOFError when the other side ends before."""
    parts = b""
    while len(parts) < size:
        try:
            part = sock.recv(size - len(parts))
        except ConnectionResetError:
            raise EOFError from None
        if not part:
            raise EOFError
        parts += part
    return parts

"""A WebSocket client on the standard library, as much of RFC 6455 as ComfyUI's server speaks."""

from __future__ import annotations

import base64
import os
import socket
from contextlib import suppress

_CONTINUED, _TEXT, _BINARY, _CLOSE, _PING, _PONG = 0, 1, 2, 8, 9, 10


class WebSocket:
    def __init__(self, port: int, path: str) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=10)
        self._stream = self._socket.makefile("rb")
        key = base64.b64encode(os.urandom(16)).decode()
        self._socket.sendall(
            f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        status = self._stream.readline()
        if b" 101 " not in status:
            raise ConnectionError(f"{path} is no WebSocket: {status!r}")
        while self._stream.readline() not in (b"\r\n", b""):
            pass
        self._socket.settimeout(None)

    def receive(self) -> str | bytes | None:
        """The next message; None when the server has gone."""
        message, kind = b"", _TEXT
        while (frame := self._frame()) is not None:
            final, opcode, payload = frame
            if opcode == _CLOSE:
                return None
            if opcode == _PING:
                self._send(_PONG, payload)
            if opcode not in (_CONTINUED, _TEXT, _BINARY):
                continue
            kind = opcode or kind
            message += payload
            if final:
                return message.decode() if kind == _TEXT else message
        return None

    def close(self) -> None:
        with suppress(OSError):  # the server was first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _frame(self) -> tuple[bool, int, bytes] | None:
        try:
            head = self._stream.read(2)
            if len(head) < 2:
                return None
            length = head[1] & 0x7F
            if length > 125:
                length = int.from_bytes(self._stream.read(2 if length == 126 else 8), "big")
            return bool(head[0] & 0x80), head[0] & 0x0F, self._stream.read(length)
        except (ConnectionError, ValueError):  # reset by a dead server, or closed by us
            return None

    def _send(self, opcode: int, payload: bytes) -> None:
        assert len(payload) < 126, "control frames are short"
        mask = os.urandom(4)
        masked = bytes(byte ^ mask[i % 4] for i, byte in enumerate(payload))
        self._socket.sendall(bytes([0x80 | opcode, 0x80 | len(payload)]) + mask + masked)

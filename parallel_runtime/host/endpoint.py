"""The address that the user names for other machines, and the network interface that has it. IPv4 only."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import socket
import struct

from ..errors import Refused

SIOCGIFADDR = 0x8915


def parse(endpoint: str) -> tuple[str, int]:
    """Address and port. Raises Refused."""
    if not endpoint.strip():
        raise Refused("several machines need rdzv_endpoint: an address of this one and a free port, as 10.0.0.1:29500")
    host, _, port = endpoint.strip().rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise Refused(f"rdzv_endpoint {endpoint!r} is no address with a port; write it as 10.0.0.1:29500")
    try:
        address = socket.gethostbyname(host)
    except (OSError, UnicodeError):
        raise Refused(f"rdzv_endpoint: {host!r} is no IPv4 address and no name of one; write it as 10.0.0.1") from None
    if address == "0.0.0.0":
        raise Refused("rdzv_endpoint 0.0.0.0 would listen to every network; name one address of this machine")
    return address, int(port)


def listen(address: str, port: int) -> socket.socket:
    """A socket that listens there and nowhere else; port 0 for any. Raises Refused."""
    server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind((address, port))
    except OSError as error:
        server.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise Refused(f"rdzv_endpoint: this machine has no address {address}; name one that it has") from None
        raise Refused(f"rdzv_endpoint: {address}:{port} cannot be had ({error.strerror}); name another port") from None
    server.listen()
    return server


def interface_of(address: str) -> str:
    """The network interface that has `address`. Raises Refused."""
    if address.startswith("127."):
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(sock, SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    raise Refused(f"rdzv_endpoint: no network interface has {address} as its first address; name one that has")

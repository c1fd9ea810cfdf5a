"""Parses and checks `rdzv_endpoint`, and finds the network interface of its address. IPv4 only."""

from __future__ import annotations

import array
import errno
import fcntl
import socket
import struct

from ..errors import Refused, quoted

SIOCGIFCONF = 0x8912
IFREQ_BYTES = 40
MAX_ADDRESSES = 1024


def split(endpoint: str) -> tuple[str, int]:
    """Returns the host and the port as written. Raises Refused."""
    if not endpoint.strip():
        raise Refused("endpoint.missing", widget="rdzv_endpoint")
    host, _, port = endpoint.strip().rpartition(":")
    if not host or not port.isdecimal() or len(port) > 5 or not 0 < int(port) < 65536:
        raise Refused("endpoint.port", widget="rdzv_endpoint", endpoint=quoted(endpoint))
    return host, int(port)


def check(endpoint: str) -> None:
    """Raises Refused for an address that no interface of this machine has. A host name is not resolved here, but when
    the workers start."""
    host, _ = split(endpoint)
    try:
        socket.inet_aton(host)
    except (OSError, ValueError):
        return
    interface_of(parse(endpoint)[0])


def parse(endpoint: str) -> tuple[str, int]:
    """Returns the address and the port. Resolving a name may take seconds. Raises Refused."""
    host, port = split(endpoint)
    try:
        address = socket.gethostbyname(host)
    except (OSError, ValueError):
        raise Refused("endpoint.name", widget="rdzv_endpoint", host=quoted(host)) from None
    if address == "0.0.0.0":
        raise Refused("endpoint.every", widget="rdzv_endpoint")
    return address, port


def listen(address: str, port: int) -> socket.socket:
    """Returns a socket that listens at this address only; port 0 for any. Raises Refused."""
    server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind((address, port))
    except OSError as error:
        server.close()
        if error.errno == errno.EADDRNOTAVAIL:
            has = sorted(addresses())
            raise Refused("endpoint.address", widget="rdzv_endpoint", address=address, addresses=has) from None
        raise Refused(
            "endpoint.taken", widget="rdzv_endpoint", address=address, port=port, error=error.strerror
        ) from None
    server.listen()
    return server


def interface_of(address: str) -> str:
    """Returns the network interface that has `address`. Raises Refused."""
    if address.startswith("127."):
        return "lo"
    interfaces = addresses()
    if address not in interfaces:
        raise Refused("endpoint.interface", widget="rdzv_endpoint", address=address, addresses=sorted(interfaces))
    return interfaces[address]


def addresses() -> dict[str, str]:
    """Returns the network interface of each address of this machine; an interface may have several."""
    found = array.array("B", bytes(MAX_ADDRESSES * IFREQ_BYTES))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        answer = fcntl.ioctl(sock, SIOCGIFCONF, struct.pack("iP", len(found), found.buffer_info()[0]))
    size = struct.unpack("iP", answer)[0]
    entries = (found[start : start + IFREQ_BYTES].tobytes() for start in range(0, size, IFREQ_BYTES))
    return {socket.inet_ntoa(entry[20:24]): entry[:16].split(b"\0")[0].decode() for entry in entries}

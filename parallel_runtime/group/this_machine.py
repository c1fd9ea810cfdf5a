"""What this machine offers a group: an address that others can reach (`rdzv_endpoint`, IPv4 only), the packages that a
plan needs, and the limits in its environment: seconds, and memory for each worker."""

import array
import contextlib
import errno
import fcntl
import logging
import math
import os
import socket
import struct
from functools import cache

from ..accelerators import KERNELS
from ..errors import Refused, quoted
from ..planning.candidates import default_plan
from ..planning.run_plan import PlanInputs, RunPlan
from ..wire.channel import read_key

SIOCGIFCONF = 0x8912
IFREQ_BYTES = 40
MAX_ADDRESSES = 1024
log = logging.getLogger(__name__)


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Returns the host and the port as written. Raises Refused."""
    if not endpoint.strip():
        raise Refused("endpoint.missing", widget="rdzv_endpoint")
    host, _, port = endpoint.strip().rpartition(":")
    if not host or not port.isdecimal() or len(port) > 5 or not 0 < int(port) < 65536:
        raise Refused("endpoint.port", widget="rdzv_endpoint", endpoint=quoted(endpoint))
    return host, int(port)


def check_endpoint(endpoint: str) -> None:
    """Raises Refused for an address that no interface of this machine has; a host name is resolved by the workers."""
    host, _ = split_endpoint(endpoint)
    try:
        socket.inet_aton(host)
    except (OSError, ValueError):
        return
    interface_of(parse_endpoint(endpoint)[0])


def parse_endpoint(endpoint: str) -> tuple[str, int]:
    """Returns the address and the port. Resolving a name may take seconds. Raises Refused."""
    host, port = split_endpoint(endpoint)
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
        reason = error.strerror
        raise Refused("endpoint.taken", "rdzv_endpoint", address=address, port=port, error=reason) from None
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


def checked_plan(inputs: PlanInputs) -> RunPlan:
    """Returns the plan as far as it needs no sizes. Raises Refused where it cannot run here: other machines could not
    reach this one, the shared token is missing, or a package is."""
    request = inputs.request
    if request.nnodes > 1:
        check_endpoint(request.rdzv_endpoint)
        read_key()
    plan = default_plan(inputs)
    kernel = KERNELS.get(request.options.attention_backend)
    if kernel and not kernel.installed:
        fix, package = {"attention_backend": "auto"}, kernel.package
        raise Refused("backend.package", "attention_backend", fix, backend=kernel.name, package=package)
    return plan


def seconds_from(variable: str, default: float) -> float:
    """Returns a limit of the environment, or with a warning the default; 0 is allowed where it is the default."""
    text = os.environ.get(variable, "").strip()
    if not text:
        return default
    number = _number(text)
    if number is not None and (number or not default):
        return number
    log.warning("[CP] %s=%r is not a valid number of seconds; using %g", variable, text, default)
    return default


def limits_by_worker(variable: str, unit: str, workers: int) -> tuple[float, ...]:
    """Returns one limit a worker, infinite for 0, from an environment variable; the least for all where there are not
    as many numbers as workers. () without limits, or with a warning for an invalid number."""
    text = os.environ.get(variable, "").strip()
    numbers = [_number(one) for one in text.split(",")] if text else []
    if None in numbers:
        _warn_of_invalid(variable, text, unit)
        return ()
    known = [number or math.inf for number in numbers]
    each = known if len(known) == workers else [min(known, default=math.inf)] * workers
    return tuple(each) if min(each) < math.inf else ()


@cache
def _warn_of_invalid(variable: str, text: str, unit: str) -> None:
    """Logs a value that is ignored: once, though it is read several times a run."""
    log.warning("[CP] %s=%r is not a %s; it is ignored", variable, text, unit)


def _number(text: str) -> float | None:
    """Returns a finite number of at least 0, or None."""
    with contextlib.suppress(ValueError):
        number = float(text)
        if math.isfinite(number) and number >= 0:
            return number
    return None

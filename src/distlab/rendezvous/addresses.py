"""Resolution of host names."""

import ipaddress
import socket
from typing import Any

from simplellm.errors import InputError


def is_loopback(address: str) -> bool:
    """Return whether an address is a loopback address; `InputError` if there is no such host."""
    _, (found, *_) = resolve(address, 0)
    return ipaddress.ip_address(str(found).partition("%")[0]).is_loopback


def resolve(address: str, port: int) -> tuple[int, tuple[Any, ...]]:
    """Return a host's socket family and socket address; `InputError` if there is no such host."""
    try:
        family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError) as error:
        raise InputError(f"--master-addr {address}: no such host ({getattr(error, 'strerror', error)})") from error
    return family, where

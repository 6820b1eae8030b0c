"""Host names and ports: their addresses, and whether a process listens there."""

import errno
import ipaddress
import os
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


def listen_at(address: str, port: int) -> socket.socket:
    """Return a socket that listens at one address of this machine; port 0 asks for a free port.

    Raises:
        InputError: the port is in use, or the address is not this machine's.
    """
    family, where = resolve(address, port)
    try:
        return socket.create_server(where, family=family, backlog=1024)
    except OSError as error:
        sentence = f"--master-addr {address}: this machine does not have that address; start rank 0 on the one that has"
        if error.errno != errno.EADDRNOTAVAIL:
            sentence = (
                f"--master-port {port}: cannot listen at {address}:{port} ({os.strerror(error.errno or 0)}); another "
                "run probably uses this port: give all ranks another one"
            )
        raise InputError(sentence) from error


def listens(address: str, port: int, unless_refused: bool = False) -> bool:
    """Return whether a process listens there; with `unless_refused`, also if this is unknown (a packet was lost)."""
    try:
        socket.create_connection((address, port), timeout=1).close()
    except OSError as error:
        return unless_refused and not isinstance(error, ConnectionRefusedError)
    return True

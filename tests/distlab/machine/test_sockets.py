"""Which connections are shut down without their owner."""

import os
import socket

import pytest

from distlab.machine.sockets import open_sockets, shut_down


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("localhost", 0)) as server:
        return socket.create_connection(server.getsockname()), server.accept()[0]


@pytest.mark.quick
@pytest.mark.parametrize("are_listed", [True, False])
def test_only_connections_that_were_there_are_shut_down(are_listed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a later one that has the number of one that was closed; also where nothing lists open files."""

    def list_nothing(path: str) -> list[str]:
        raise FileNotFoundError(path)

    if not are_listed:  # /dev/fd is a link into /proc, which may be missing
        monkeypatch.setattr(os, "listdir", list_nothing)

    before = open_sockets()
    stays, peer = connected()
    closed, _ = connected()
    ours = {each for each in open_sockets() - before if each[0] != peer.fileno()}  # which is of another process
    number = closed.fileno()
    closed.close()
    later, its_peer = connected()
    assert later.fileno() == number
    shut_down(ours)
    its_peer.send(b"still there")
    assert later.recv(20) == b"still there"
    peer.settimeout(10)
    assert stays.recv(20) == peer.recv(20) == b"", "at both ends"


@pytest.mark.quick
def test_a_connection_that_gets_its_number_at_the_last_moment_is_not_shut_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo's thread closes one as it is looked at."""
    (closed, _), (later, its_peer), copy = connected(), connected(), os.dup
    monkeypatch.setattr(os, "dup", lambda _: copy(later.fileno()))
    shut_down([(closed.fileno(), os.fstat(closed.fileno()).st_ino)])
    its_peer.send(b"still there")
    assert later.recv(20) == b"still there"

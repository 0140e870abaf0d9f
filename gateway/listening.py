"""Listening sockets: taken ports are told in one line, and a port is handed over without a connection being lost.

Two gateways may listen on one port (`reuse_port`, Linux): the kernel deals new connections out among them. What it has
dealt to a socket that is closed is reset, and its client sees a failure that no rule of HTTP lets it repeat. So before
a listener is closed it is made deaf: the kernel drops the first packet of a new connection to it, the client's kernel
sends that packet again after 1 s, and by then it goes to whoever still listens.
"""

from __future__ import annotations

import ctypes
import errno
import socket
import sys
from typing import Final

LISTEN_BACKLOG: Final = 2_048
"""Connections that may wait to be accepted. They wait for one turn of the event loop; the kernel's own bound
(`net.core.somaxconn`) is 4,096. One too many is not answered by the kernel, and its client tries again a second later:
the bound that refuses is `connections_max`."""

_SO_ATTACH_FILTER: Final = 26
_TCP_FLAGS_AT: Final = 13
_TCP_SYN: Final = 0x02
_LOAD_BYTE: Final = 0x30
_JUMP_IF_ANY_BIT: Final = 0x45
_RETURN: Final = 0x06
_WHOLE: Final = 0xFFFF_FFFF
_NOTHING: Final = 0


class PortUnavailable(Exception):
    """The address cannot be listened on. One line that says what to do."""


def bind(host: str, port: int, *, option: str, unread_limit_s: float = 60.0, reuse_port: bool = False) -> socket.socket:
    """A socket on `host`:`port` (0 = a free one), which listens.

    With `reuse_port` others may listen there too, if they said so as well, and it does not listen yet: the kernel would
    deal connections to a process that cannot serve them. `unread_limit_s`: the kernel ends a connection whose far side
    takes nothing of what is written to it for so long (Linux). Raises `PortUnavailable` naming the command line
    `option`.
    """
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = infos[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if reuse_port:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                # Accepted sockets inherit it. Closing a connection waits for what is buffered: without a limit, a
                # client that never reads would keep its file descriptor for ever, whatever we do.
                listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(unread_limit_s * 1e3))
            listener.bind(address)
            if not reuse_port:
                listener.listen(LISTEN_BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        remedy = f"stop what uses it or choose another {option}"
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            remedy = f"choose an address of this machine with {option.replace('port', 'host')}"
        raise PortUnavailable(f"cannot listen on {host}:{port} ({reason}): {remedy}") from error
    listener.setblocking(False)
    return listener


class _Instruction(ctypes.Structure):
    """`struct sock_filter` of linux/filter.h."""

    _fields_ = (("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint))


class _Program(ctypes.Structure):
    """`struct sock_fprog` of linux/filter.h."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def deafen(listener: socket.socket) -> bool:
    """Begin no new connection on `listener`; those begun go on. Says whether the kernel can do that (Linux).

    A filter on a socket sees a packet from its TCP header on (linux/net/ipv4/tcp_ipv4.c, `tcp_filter`). Accepted
    sockets inherit it, which does them no harm: nothing that they get has the SYN flag.
    """
    if sys.platform != "linux":
        return False
    instructions = (_Instruction * 4)(
        _Instruction(_LOAD_BYTE, 0, 0, _TCP_FLAGS_AT),
        _Instruction(_JUMP_IF_ANY_BIT, 0, 1, _TCP_SYN),
        _Instruction(_RETURN, 0, 0, _NOTHING),
        _Instruction(_RETURN, 0, 0, _WHOLE),
    )
    program = _Program(len(instructions), ctypes.addressof(instructions))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, bytes(program))
    return True

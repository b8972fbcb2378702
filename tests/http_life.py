"""Clients that leave without a word, and waiting for what should follow."""

from __future__ import annotations

import json
import socket
import struct
import time
from urllib.parse import urlsplit


def post_raw(live, path, body):
    """An open socket with the request sent."""
    parts = urlsplit(live.url)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    sock = socket.create_connection((parts.hostname, parts.port))
    sock.sendall(head.encode() + data)
    return sock


def leave(sock, how):
    if how == "reset":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()
    elif how == "half":
        sock.shutdown(socket.SHUT_WR)
    else:
        sock.close()


def wait_for(condition, seconds=3.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.005)
    return False

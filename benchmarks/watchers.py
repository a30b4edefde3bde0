"""Browsers that watch event streams, as a process of their own: they read, and that is all.

`python -m benchmarks.watchers PORT`. Each line of standard input is a JSON list of (path, cookie)
to watch from then on, all at once; the earlier ones are left. Each is answered with a line: the
bytes and events that the streams left behind had brought.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import sys

READ_BYTES = 1 << 16
NICE = 19  # in life they are other machines


def _watch(port: int, path: str, cookie: str) -> socket.socket:
    stream = socket.create_connection(("127.0.0.1", port))
    stream.sendall(
        f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nCookie: {cookie}\r\n"
        "Accept: text/event-stream\r\n\r\n".encode()
    )
    return stream


def main(port: int) -> None:
    """Serve standard input until it ends."""
    os.nice(NICE)
    waiting = selectors.DefaultSelector()
    waiting.register(sys.stdin, selectors.EVENT_READ)
    streams: list[socket.socket] = []
    num_bytes = num_events = 0
    while True:
        for key, _ in waiting.select():
            if isinstance(key.fileobj, socket.socket):
                if key.fileobj.fileno() < 0:
                    continue  # left a moment ago
                data = key.fileobj.recv(READ_BYTES)
                num_bytes += len(data)
                num_events += data.count(b"\n\n")
                if not data:
                    waiting.unregister(key.fileobj)
                continue
            line = sys.stdin.readline()
            if not line:
                return
            for stream in streams:
                if stream in waiting.get_map():
                    waiting.unregister(stream)
                stream.close()
            streams = [_watch(port, path, cookie) for path, cookie in json.loads(line)]
            for stream in streams:
                waiting.register(stream, selectors.EVENT_READ)
            print(json.dumps({"bytes": num_bytes, "events": num_events}), flush=True)
            num_bytes = num_events = 0


if __name__ == "__main__":
    main(int(sys.argv[1]))

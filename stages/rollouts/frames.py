"""Records in a file that grows at its end: each has a checksum, so that one that a kill has cut is left out."""

import struct
import zlib
from collections.abc import Iterator

_HEAD = struct.Struct("<II")
"""Checksum and length of what follows."""


def framed(body: bytes) -> bytes:
    """A record as it is written, in one piece."""
    return _HEAD.pack(zlib.crc32(body), len(body)) + body


def frames(content: bytes) -> Iterator[bytes]:
    """The records of a file, up to the first that is not whole."""
    place = 0
    while place + _HEAD.size <= len(content):
        checksum, length = _HEAD.unpack_from(content, place)
        body = content[place + _HEAD.size : place + _HEAD.size + length]
        if len(body) != length or zlib.crc32(body) != checksum:
            return
        place += _HEAD.size + length
        yield body

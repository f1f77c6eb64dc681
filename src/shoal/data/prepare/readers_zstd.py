"""Zstandard, block by block, so that no call puts out more than a block holds.

python-zstandard's `decompressobj` puts out all that its input expands to: four bytes of a block that repeats one byte
make 128 KiB, so 16 KiB of input made 512 MiB. Its readers that stop at a size take a truncated file for a whole one. So
the stream is cut here where its blocks end (RFC 8878, section 3.1.1): a block says how long it is in its first three
bytes, and makes 2 MiB at most.
"""

from __future__ import annotations

from collections.abc import Iterator

from shoal.data.broken import Broken

_SKIPPABLE = 0x184D2A50  # to 5F: what a tool has put in for itself
_HEADER_BYTES = 18  # of a frame, at most
_RLE, _RESERVED = 1, 3


def unzstd(blocks: Iterator[bytes], most_window_bytes: int) -> Iterator[bytes]:
    import zstandard

    source = _Source(blocks)
    decompressor = zstandard.ZstdDecompressor(max_window_size=most_window_bytes)
    try:
        while head := source.peek(_HEADER_BYTES):
            if int.from_bytes(head[:4], "little") & ~0xF == _SKIPPABLE:
                source.skip(int.from_bytes(source.take(8)[4:], "little"))
                continue
            if len(head) < 6:  # the least that a frame's header has
                raise Broken("is a truncated zstandard file")
            frame = zstandard.get_frame_parameters(head)
            if frame.window_size > most_window_bytes:
                raise Broken(
                    f"asks for a zstandard window of {frame.window_size >> 20:,} MiB, where at most "
                    f"{most_window_bytes >> 20:,} are taken",
                    f"allow it with --buffer-mb {-(-frame.window_size >> 20)} (memory of that size a process)",
                )
            yield from _frame(source, decompressor.decompressobj(), frame, zstandard.frame_header_size(head))
    except zstandard.ZstdError as e:
        raise Broken(f"is a damaged zstandard file ({e})") from None


def _frame(source: _Source, stream: object, frame: object, header_bytes: int) -> Iterator[bytes]:
    decompress = stream.decompress  # type: ignore[attr-defined]  # the package has no classes for mypy to know
    decompress(source.take(header_bytes))
    last = False
    while not last:
        head = source.take(3)
        word = int.from_bytes(head, "little")
        last, kind, size = bool(word & 1), word >> 1 & 3, word >> 3
        if kind == _RESERVED:
            raise Broken("is a damaged zstandard file (a block of no known kind)")
        yield decompress(head + source.take(1 if kind == _RLE else size))
    if frame.has_checksum:  # type: ignore[attr-defined]
        decompress(source.take(4))
    if not stream.eof:  # type: ignore[attr-defined]
        raise Broken("is a damaged zstandard file (a frame that goes on after its last block)")


class _Source:
    """Bytes in the amounts that are asked for."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = blocks
        self._data = b""
        self._at = 0

    def peek(self, size: int) -> bytes:
        """The next bytes; fewer at the end."""
        while len(self._data) - self._at < size and (block := next(self._blocks, b"")):
            self._data = self._data[self._at :] + block
            self._at = 0
        return self._data[self._at : self._at + size]

    def take(self, size: int) -> bytes:
        data = self.peek(size)
        if len(data) < size:
            raise Broken("is a truncated zstandard file")
        self._at += size
        return data

    def skip(self, size: int) -> None:
        while size > (here := len(self._data) - self._at):
            size -= here
            self._data, self._at = next(self._blocks, b""), 0
            if not self._data:
                raise Broken("is a truncated zstandard file")
        self._at += size

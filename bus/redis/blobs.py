"""Blobs: bodies too large to stand in a stream entry or a record, as hashes of chunks.

Invariants: each upload has an id of its own, so that nothing that is being read can be overwritten; a blob that nothing
refers to goes after its TTL; the script that deletes the entry or record deletes the blob with it.
"""

from __future__ import annotations

from tinsmith.bus.protocol.envelope import new_id
from tinsmith.bus.protocol.errors import Busy, ProtocolError
from tinsmith.bus.redis.session import Session

INLINE_BYTES = 256 * 1024
"""Bodies up to this size stand in the entry itself."""
BLOB_CHUNK_BYTES = 4 * 1024 * 1024
ORPHAN_SECONDS = 3600


async def put_blob(session: Session, body: bytes, *, forced: bool = False) -> str:
    """Store a body and return its blob id. `forced` passes even when the server's memory is full (for results).

    Raises Busy when the memory is full and it is not forced.
    """
    blob = new_id()
    view = memoryview(body)
    try:
        for chunk, at in enumerate(range(0, len(body), BLOB_CHUNK_BYTES)):
            piece = bytes(view[at : at + BLOB_CHUNK_BYTES])
            await session.script("put", [session.keys.blob(blob)], int(forced), ORPHAN_SECONDS, chunk, piece)
    except Busy:
        await delete_blob(session, blob)
        raise
    return blob


async def get_blob(session: Session, blob: str, size: int) -> bytes:
    """The body of a blob of `size` bytes. Raises ProtocolError when it is not there whole."""
    chunks = range((size + BLOB_CHUNK_BYTES - 1) // BLOB_CHUNK_BYTES)
    pieces = await session.call(*(("HGET", session.keys.blob(blob), chunk) for chunk in chunks))
    if any(piece is None for piece in pieces) or sum(map(len, pieces)) != size:
        raise ProtocolError(f"blob {blob} of {size} bytes is not there whole", remedy="Submit the command again.")
    return b"".join(pieces)


async def delete_blob(session: Session, blob: str) -> None:
    """Delete a blob; harmless when it is not there."""
    await session.call(("UNLINK", session.keys.blob(blob)))

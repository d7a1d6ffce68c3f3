"""A .gguf file as a Hugging Face checkpoint, unpacked once.

Reading a GGUF takes tens of seconds of Python (vocabulary and merges, entry by entry) each time; ranks and samplers
load the unpacked directory in a fraction of that, with the same float32 weights.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any, cast

from tinsmith.actors.engine.checkpoint import write_directory
from tinsmith.actors.engine.model.base import load_base, load_tokenizer, locate
from tinsmith.bus.protocol.errors import TinsmithError


def unpacked(path: str | Path, cache: Path) -> Path:
    """A directory that loads without GGUF: `path` itself when it is one, else made under `cache` if not there yet.

    The place is named after the file and its size and time of change. Raises NotAModel or UnsupportedModel.
    """
    directory, extra = locate(path)
    if not extra:
        return directory
    file = directory / extra["gguf_file"]
    stat = file.stat()
    key = hashlib.sha256(f"{file.resolve()}/{stat.st_size}/{stat.st_mtime_ns}".encode()).hexdigest()[:12]
    place = cache / f"{file.stem}-{key}"
    if place.is_dir():
        return place
    module = cast(Any, load_base(file, name=file.stem).module)
    tokenizer = load_tokenizer(file)

    def fill(fresh: Path) -> None:
        module.save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)

    write_directory(place, fill)
    return place


def main(path: str, cache: str) -> int:
    """Unpack in a process of its own: prints the directory, or the typed error as JSON with exit code 1."""
    try:
        print(unpacked(path, Path(cache)))
    except TinsmithError as error:
        print(json.dumps(error.to_wire()))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

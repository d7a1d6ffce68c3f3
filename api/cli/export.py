"""`tinsmith export`: a checkpoint or version from a service's state folder, in a format that others load. Offline."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from tinsmith.api.client.address import default_state
from tinsmith.api.http.tenancy.names import STORED_KINDS, parse_path, root_of
from tinsmith.bus.protocol.envelope import NAME_PATTERN
from tinsmith.bus.protocol.errors import InvalidInput, UnknownVersion

_PLACE = re.compile(f"^({NAME_PATTERN})/({NAME_PATTERN})$")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `tinsmith export`."""
    parser.add_argument("source", help="MODEL/NAME, or a tinker:// path")
    parser.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="a new folder")
    parser.add_argument("--state", type=Path, default=None, help="the service's state folder (default as for serve)")
    parser.add_argument("--model", type=Path, default=None, help="path of the base model (needed to merge adapters)")
    parser.add_argument(
        "--format",
        choices=["peft", "hf"],
        default=None,
        help="peft: an adapter; hf: a whole model, adapters merged (default: peft, hf after full fine-tuning)",
    )


def run(args: argparse.Namespace) -> int:
    """Export one; raises UnknownVersion, InvalidInput, DamagedCheckpoint, NotAModel, DiskFull."""
    state = Path(args.state if args.state is not None else default_state()).expanduser()
    source = find_source(state, args.source)
    from tinsmith.actors.engine.export import export

    model = args.model.expanduser() if args.model is not None else None
    try:
        done = export(source, args.to.expanduser(), base=model, format=args.format)
    except OSError as error:
        raise InvalidInput(f"{args.source} can't be exported: {error}", remedy="Name another --to.") from error
    print(f"exported {args.source} as {done.format} to {done.path}: {done.size / 1e6:.1f} MB")
    return 0


def find_source(state: Path, source: str) -> Path:
    """The folder of a checkpoint or version. A bare MODEL/NAME may be either, but must not be both.

    Raises InvalidInput for what is no such name, UnknownVersion when there is none.
    """
    place = _PLACE.fullmatch(source)
    if source.startswith("tinker://"):
        path = parse_path(source).stored
        found = [state / root_of(path.kind) / path.place]
    elif place:
        found = [state / root_of(kind) / place[1] / place[2] for kind in STORED_KINDS]
    else:
        raise InvalidInput(
            f"{source!r} names no checkpoint or version",
            remedy="Use MODEL/NAME or tinker://MODEL/weights/NAME.",
            field="source",
        )
    found = [folder for folder in found if folder.is_dir()]
    if not found:
        raise UnknownVersion(f"there is no {source} in {state}", remedy="Name the service's --state and a saved name.")
    if len(found) > 1:
        assert place is not None
        both = " or ".join(f"tinker://{place[1]}/{kind}/{place[2]}" for kind in STORED_KINDS)
        raise InvalidInput(f"{source} is both a checkpoint and a version", remedy=f"Use {both}.", field="source")
    return found[0]

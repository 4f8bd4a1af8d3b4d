"""`mm-models convert-data`: annotations of other projects as rows of the training format, in their order.

    mm-models convert-data llava --annotations llava_instruct_150k.json --images train2017 [--expect-images 118287]

`llava` reads LLaVA's rows: `conversations` of human and gpt, `image` a path relative to --images. It writes one JSON array
of {"messages": [{"role", "content"}], "images": [path]}; `dataset_dir` is the folder of --images. Text and the place of
each <image> stay as they are. Nothing is shuffled or left out unsaid: an image that is missing or empty is an error with
the count and the first names, or, with --skip-missing, its rows are left out and counted.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mm_models.cli.parser import StrictParser, positive, writing
from mm_models.errors import UserError, unknown_name

PROG = "mm-models convert-data"
OUT = "mllm_format_llava_instruct_data.json"
"""The name by which the field's configurations know it."""
SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"}
LISTED = 10
"""How many names an error writes out."""


def main(arguments: Sequence[str]) -> int:
    """The command; its exit status."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        print(_parser().format_help())
        return 0 if arguments else 2
    if arguments[0] != "llava":
        raise unknown_name("format", arguments[0], ["llava"], where=PROG)
    return _llava(_parser().parse_strict(arguments[1:]))


def _parser() -> StrictParser:
    parser = StrictParser(prog=f"{PROG} llava", description="LLaVA annotations and an image folder as training rows.")
    parser.add_argument("--annotations", required=True, metavar="FILE", help="JSON array or JSONL of LLaVA's rows")
    parser.add_argument("--images", required=True, metavar="DIR", help="folder the paths in `image` are relative to")
    parser.add_argument("--out", "-o", default=OUT, metavar="FILE", help=f"file to write (default: {OUT})")
    parser.add_argument(
        "--expect-images", type=positive, metavar="N", help="refuse a folder that does not hold exactly N images"
    )
    parser.add_argument("--skip-missing", action="store_true", help="leave out rows whose image is not there")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing file")
    return parser


def _llava(args: argparse.Namespace) -> int:
    from mm_models.data.files import RowFiles

    folder, out = Path(args.images), Path(args.out)
    if not folder.is_dir():
        raise UserError(f"--images {folder}: no such folder.")
    if not Path(args.annotations).is_file():
        raise UserError(f"--annotations {args.annotations}: no such file.")
    if out.exists() and not out.is_file():
        raise UserError(f"--out {out}: not a file.")
    if out.exists() and not args.overwrite:
        raise UserError(f"{out}: exists already. Give another file, or --overwrite.")
    if args.expect_images is not None:
        _check_count(folder, args.expect_images)
    rows, part = RowFiles.open([Path(args.annotations)]), out.with_name(f".{out.name}.part")
    with writing(f"--out {out}"):
        out.parent.mkdir(parents=True, exist_ok=True)
        try:
            written = _write(rows, folder, part, skip=args.skip_missing)
            os.replace(part, out)
        finally:
            part.unlink(missing_ok=True)
    print(*written, sep="\n")
    print(f"dataset {out}, dataset_dir {folder}")
    return 0


def _check_count(folder: Path, expected: int) -> None:
    found = sum(Path(name).suffix.lower() in SUFFIXES for _, _, names in os.walk(folder) for name in names)
    if found != expected:
        raise UserError(
            f"{folder} holds {found} images, expected {expected} (--expect-images). "
            "Unpack the whole archive before converting: rows that are left out shift the order of all that follow."
        )


def _write(rows: Any, folder: Path, out: Path, *, skip: bool) -> list[str]:
    """Write every row to `out`; the lines that say what was written. UserError for rows that cannot be."""
    from mm_models.data.rows import ranges

    faults: list[str] = []
    notes: dict[str, list[int]] = {}
    without: list[int] = []
    there: dict[str, bool] = {}
    samples, digest = 0, hashlib.sha256()
    with out.open("wb") as file:

        def put(data: bytes) -> None:
            file.write(data)
            digest.update(data)

        for number in range(len(rows)):
            try:
                row, noted = _row(number, rows.read(number))
            except UserError as error:
                faults.append(f"row {number}: {error}")
                continue
            for name in row["images"]:
                if name not in there:
                    there[name] = _usable(folder / name)
            if not all(there[name] for name in row["images"]):
                without.append(number)
                continue
            for note in noted:
                notes.setdefault(note, []).append(number)
            put((",\n" if samples else "[\n").encode() + json.dumps(row, ensure_ascii=False).encode())
            samples += 1
        put(b"\n]\n" if samples else b"[]\n")
    if faults:
        shown = "\n".join(faults[:LISTED])
        raise UserError(f"{len(faults)} of {len(rows)} rows cannot be converted; nothing is written.\n{shown}")
    missing = [name for name, usable in there.items() if not usable]
    if missing:
        shown = ", ".join(missing[:LISTED]) + (", ..." if len(missing) > LISTED else "")
        count = f"{len(missing)} images are missing or empty in {folder}, {len(without)} of {len(rows)} rows name one"
        if not skip:
            raise UserError(f"{count}: {shown}. Nothing is written; complete the folder, or give --skip-missing.")
    if not samples:
        raise UserError(f"no row is left of {len(rows)}; nothing is written.")
    images = len(there) - len(missing)
    lines = [f"{count}; left out (--skip-missing): {shown}"] if missing else []
    lines += [f"note: {note}: {len(found)} rows: {ranges(found)}" for note, found in sorted(notes.items())]
    return [*lines, f"{samples} samples, {images} images, in the order of the annotations, sha256 {digest.hexdigest()}"]


def _row(number: int, value: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    """A LLaVA row in the training format, and what there is to note about it."""
    from mm_models.config.data import Attributes
    from mm_models.data.rows import parse_row

    llava = Attributes(
        messages="conversations",
        images="image",
        role_tag="from",
        content_tag="value",
        user_tag="human",
        assistant_tag="gpt",
    )
    conversation = parse_row(number, value, llava)
    images = list(conversation.images)
    if not all(isinstance(image, str) for image in images):
        raise UserError("an image is not a path")
    messages = [{"role": turn.role, "content": turn.text} for turn in conversation.turns]
    return {"messages": messages, "images": images}, conversation.notes


def _usable(path: Path) -> bool:
    try:
        return path.is_file() and path.stat().st_size > 0
    except OSError:
        return False

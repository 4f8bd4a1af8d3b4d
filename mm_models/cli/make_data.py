"""`mm-models make-data`: a mock data set, for a first run or a measurement. The same files for the same options.

    mm-models make-data --samples 100 --images 1 --image-size 640x480 --text-tokens 200 --seed 1 --out DIR

Every sample is one question and one answer with --images pictures of --image-size, and --text-tokens words of text in
all, about as many tokens. DIR gets `train.json` and `images`; it is the `dataset_dir` of a data.json.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path

from mm_models.cli.parser import StrictParser, natural, positive, writing
from mm_models.errors import UserError

PROG = "mm-models make-data"
TEXT = (
    "a the one two red blue green big small old new cat dog bird tree house road river city man woman child car boat "
    "sky sun rain snow light dark day night left right near far over under in on at by with from to and or is are was "
    "were has had see hold run walk sit stand eat read"
)
"""The words of questions and answers, drawn at random."""
THINNEST, LARGEST = 200, 178956970
"""Bounds of a picture that training takes: of the image processors, and of PIL."""
BLOCKS = 8
"""A picture is a pattern of so many squares a side."""


def main(arguments: Sequence[str]) -> int:
    """The command; its exit status."""
    parser = StrictParser(prog=PROG, description=__doc__)
    parser.add_argument("--samples", type=positive, required=True, metavar="N", help="rows")
    parser.add_argument("--images", type=natural, default=1, metavar="K", help="pictures of each row (default: 1)")
    parser.add_argument("--image-size", type=_size, default=(448, 448), metavar="WxH", help="default: 448x448")
    parser.add_argument("--text-tokens", type=positive, default=64, metavar="T", help="words per row (default: 64)")
    parser.add_argument("--seed", type=natural, default=0, metavar="S", help="another seed, another set (default: 0)")
    parser.add_argument("--out", "-o", required=True, metavar="DIR", help="folder to write")
    args = parser.parse_strict(arguments)
    if args.text_tokens < 2:
        raise UserError("--text-tokens: got 1, expected at least 2: a question and an answer.")
    out = Path(args.out)
    if (out / "train.json").exists() or (out / "images").exists():
        raise UserError(f"{out}: holds a data set already. Name another folder, or remove it.")
    with writing(f"--out {out}"):
        rows = [_row(args, out, number) for number in range(args.samples)]
        out.mkdir(parents=True, exist_ok=True)
        (out / "train.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(
        f"{args.samples} samples, {args.samples * args.images} images: dataset {out / 'train.json'}, dataset_dir {out}"
    )
    return 0


def _row(args: argparse.Namespace, out: Path, number: int) -> dict[str, object]:
    """A row, whose pictures are written."""
    draw = random.Random(f"{args.seed}:{number}")
    names = [f"images/{number:06}_{place}.png" for place in range(args.images)]
    for name in names:
        _picture(draw, args.image_size, out / name)
    words = draw.choices(TEXT.split(), k=args.text_tokens)
    question, answer = words[: len(words) // 2], words[len(words) // 2 :]
    content = "<image>" * len(names) + " ".join(question)
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": " ".join(answer)}]
    return {"messages": messages, "images": names}


def _picture(draw: random.Random, size: tuple[int, int], path: Path) -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    pattern = Image.frombytes("RGB", (BLOCKS, BLOCKS), draw.randbytes(BLOCKS * BLOCKS * 3))
    pattern.resize(size, Image.Resampling.NEAREST).save(path)


def _size(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if not found:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected WIDTHxHEIGHT such as 640x480")
    width, height = int(found[1]), int(found[2])
    if max(width, height) > THINNEST * min(width, height) or width * height > LARGEST:
        raise argparse.ArgumentTypeError(
            f"got {text!r}, expected at most 1 : {THINNEST} and {LARGEST} pixels: training refuses other pictures"
        )
    return width, height

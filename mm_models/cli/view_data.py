"""`mm-models view-data`: a sample as a person would check it, in the terminal or as one HTML page.

    mm-models view-data --mm-data data.json --index 0 [--count 3] [--html page.html]
    mm-models view-data --config config.yaml --index 0 [section.key=value ...]

A sample is shown as the model gets it, decoded from its ids: trained tokens are marked, image tokens folded into a line
with the picture's size, its grid and count; control characters, as `\\x1b`. Rows are numbered through all files, as in
every report. A row that is not a sample, or not in the training split, is shown with the reason; a refused one makes the
exit status 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mm_models.cli.parser import StrictParser, natural, positive, writing
from mm_models.errors import UserError

if TYPE_CHECKING:
    from mm_models.cli.runs import Run
    from mm_models.config.data import DataConfig
    from mm_models.data.examine import Outcome

PROG = "mm-models view-data"
TURNS = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
"""Directions of the characters that turn what follows."""


def visible(text: str, *, keep: str = "") -> str:
    """With what a terminal or a browser would obey in place of showing it written out: control characters and those
    that turn the direction of text."""

    def shown(char: str) -> bool:
        return unicodedata.category(char) not in ("Cc", "Cs") and unicodedata.bidirectional(char) not in TURNS

    return "".join(char if char in keep or shown(char) else ascii(char)[1:-1] for char in text)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Picture:
    """An image of a sample: `size` and `used` are (width, height), as it is and as the model sees it."""

    source: Any
    size: tuple[int, int]
    used: tuple[int, int]
    grid: tuple[int, int, int]
    tokens: int

    def line(self) -> str:
        (width, height), used = self.size, f"{self.used[0]} x {self.used[1]}"
        grid = " x ".join(map(str, self.grid))
        return f"{visible(str(self.source))}: {width} x {height}, used as {used}, grid {grid}, {self.tokens} tokens"


@dataclasses.dataclass(frozen=True, kw_only=True)
class View:
    """A row and what became of it. `runs` are the sample's ids; an image's run has the next of `pictures`."""

    place: str
    row: int
    cutoff: int
    outcome: Outcome
    left_out: str | None = None
    """Why the row is not in the training split."""
    runs: tuple[Run, ...] = ()
    pictures: tuple[Picture, ...] = ()

    @property
    def title(self) -> str:
        return visible(f"row {self.row} ({self.place})")

    def facts(self) -> list[str]:
        """Lines about the whole of it."""
        sample, notes = self.outcome.sample, [f"note: {note}" for note in self.outcome.notes]
        notes += [f"NOT TRAINED: {self.left_out}"] if self.left_out else []
        if sample is None:
            reason = self.outcome.fault or self.outcome.dropped
            return [f"{'REFUSED' if self.outcome.fault else 'LEFT OUT'}: {reason}", *notes]
        images = sum(picture.tokens for picture in self.pictures)
        return [
            f"{len(sample.ids)} tokens of at most {self.cutoff} (cutoff_len); {sample.labelled} trained",
            f"{len(self.pictures)} images, {images} image tokens",
            *notes,
        ]


def main(arguments: Sequence[str]) -> int:
    """The command; its exit status."""
    parser = StrictParser(prog=PROG, description=__doc__)
    parser.add_argument("--mm-data", metavar="FILE", help="data.json")
    parser.add_argument("--config", metavar="FILE", help="YAML of pretrain_fsdp2.py, in its place")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="with --config: put into the YAML")
    parser.add_argument("--index", type=natural, required=True, metavar="I", help="row to show, from 0")
    parser.add_argument("--count", type=positive, default=1, metavar="N", help="rows from there on (default: 1)")
    parser.add_argument("--html", metavar="FILE", help="write a self-contained page instead")
    args = parser.parse_strict(arguments)
    views = look(_config(args), args.index, args.count)
    if args.html:
        from mm_models.cli.view_html import page

        with writing(f"--html {args.html}"):
            Path(args.html).parent.mkdir(parents=True, exist_ok=True)
            Path(args.html).write_text(page(views), encoding="utf-8")
        print(f"{args.html}: {', '.join(view.title for view in views)}")
    else:
        for view in views:
            _show(view)
    return int(any(view.outcome.fault for view in views))


def _config(args: argparse.Namespace) -> DataConfig:
    if bool(args.mm_data) == bool(args.config):
        raise UserError("give --mm-data or --config, one of them.")
    if args.mm_data:
        if args.overrides:
            raise UserError(f"{args.overrides[0]} belongs to --config; change data.json.")
        from mm_models.config.data import load_data_config

        return load_data_config(args.mm_data)
    from mm_models.config.fsdp2 import load_config, plugins

    config = load_config(args.config, args.overrides)
    plugins.load(config.training.plugin)
    return config.data


def look(config: DataConfig, index: int, count: int) -> list[View]:
    """Rows `index` to `index + count`, examined as a run examines them."""
    from mm_models.data.examine import Examiner, make_processor, make_template
    from mm_models.data.files import RowFiles, find_files
    from mm_models.data.selection import left_out

    config.check_ids()
    basic = config.dataset_param.basic_parameters
    files = RowFiles.open(find_files(basic.files, basic.dataset_dir))
    if index + count > len(files):
        raise UserError(f"--index {index} --count {count}: there are {len(files)} rows, the last is {len(files) - 1}.")
    processor = make_processor(config)
    template = make_template(config, processor)
    examiner = Examiner(config, processor, template, base=basic.dataset_dir, decode=True)
    views = []
    for row in range(index, index + count):
        path, number = files.origin(row)
        outcome = examiner.examine(row, files.read(row))
        shown = {"place": f"{path}: row {number}", "row": row, "cutoff": basic.cutoff_len, "outcome": outcome}
        reason = left_out(basic, files, row)
        views.append(View(**shown, left_out=reason, **_sample(outcome, processor)))
    return views


def _sample(outcome: Outcome, processor: Any) -> dict[str, Any]:
    from mm_models.cli.runs import runs
    from mm_models.data.images import load_rgb

    sample = outcome.sample
    if sample is None:
        return {}
    trained = [False] * len(sample.ids)
    for start, end in sample.trained:
        trained[start:end] = [True] * (end - start)
    images = processor.image_processor
    pictures = [
        Picture(
            source=source,
            size=load_rgb(source).size,
            used=(grid[2] * images.patch_size, grid[1] * images.patch_size),
            grid=grid,
            tokens=grid[0] * grid[1] * grid[2] // images.merge_size**2,
        )
        for source, grid in zip(sample.images, sample.grids, strict=True)
    ]
    counts = [picture.tokens for picture in pictures]
    found = runs(
        processor.tokenizer.backend_tokenizer, list(sample.ids), trained, image=(processor.image_token_id, counts)
    )
    return {"runs": tuple(found), "pictures": tuple(pictures)}


def _show(view: View) -> None:
    """Print with colours where the terminal has them; the margin says the same without."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    console.print(Text(view.title, style="bold"))
    for fact in view.facts():
        console.print(Text(f"  {fact}", style="red" if view.outcome.sample is None else ""))
    pictures = iter(view.pictures)
    for run in view.runs:
        if run.image:
            console.print(Text.assemble(("  image   | ", "cyan"), (next(pictures).line(), "cyan")))
            continue
        text = visible(f"{run.text} x {run.count}" if run.repeat else run.text, keep="\n\t")
        margin, style = ("trained", "bold green") if run.trained else ("", "")
        for line in text.split("\n"):
            console.print(Text.assemble((f"  {margin:7} | ", "dim"), (line, style)))

"""The data pipeline: samples a second against a plain loop over Hugging Face's processor, and the memory of examining.

    python -m benchmarks.data                       # both
    python -m benchmarks.data loading --seconds 20
    python -m benchmarks.data examining --rows 100000 --workers 2

`loading`: the quickstart's photographs (out of the scikit-image wheel) and conversations. The plain loop opens the
pictures of a row and calls the processor on its messages, which gives ids and pixels; the loader also gives labels,
masks and positions. One process each: the loop itself, one worker, two workers; the first batches, while workers start,
are not counted. The order of the sides turns round with every round; ratios are medians over rounds.

`examining`: rows of a JSON file that share those photographs, tokenised into the Arrow file. Peak memory is that of the
main process, beside what it was when processor and libraries were loaded.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mm_models.config.data import DataConfig
from mm_models.config.strict import validate
from mm_models.data.dataset import ChatDataset
from mm_models.data.examine import make_processor, make_template
from mm_models.data.images import load_rgb
from mm_models.data.loader import build_loader
from mm_models.data.rows import parse_row
from tests.data import kit

PIXELS = 262144
"""Most pixels of an image, as in the published configurations."""
GROWTH = 64
"""MiB that the main process may grow while it has rows examined, however many."""
SKIPPED = 12
"""Batches before the clock starts."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("part", nargs="?", choices=["loading", "examining"], help="both where it is not given")
    parser.add_argument("--seconds", type=float, default=20, help="of each side in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=100000, help="rows to examine")
    parser.add_argument("--workers", type=int, default=0, help="preprocessing_num_workers")
    options = parser.parse_args()
    print(f"cores {os.cpu_count()}, load {os.getloadavg()[0]:.1f}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        kit.processor_folder(base / "hf")
        kit.quickstart("make_data").write_data(base, base / "hf")
        if options.part != "examining":
            loading(base, options.seconds, options.rounds)
        if options.part != "loading":
            examining(base, options.rows, options.workers)
    print(f"load {os.getloadavg()[0]:.1f}")


def config(base: Path, **changes: Any) -> DataConfig:
    """The quickstart's data.json with large images."""
    value = json.loads((base / "data.json").read_text(encoding="utf-8"))
    parameters = value["dataset_param"]
    parameters["preprocess_parameters"]["image_max_pixels"] = PIXELS
    parameters["basic_parameters"] |= {"cutoff_len": 4096} | changes.pop("basic", {})
    value["dataloader_param"] |= changes
    return validate(DataConfig, value, "data.json")


def loading(base: Path, seconds: float, rounds: int) -> None:
    """Samples a second of each side."""
    sides: dict[str, Callable[[], Iterator[Any]]] = {
        "plain loop": lambda: plain(config(base)),
        "one worker": lambda: load(config(base, num_workers=1)),
        "two workers": lambda: load(config(base, num_workers=2)),
    }
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        names = list(sides)
        for name in names[number % 3 :] + names[: number % 3]:
            rates[name].append(rate(sides[name](), seconds))
            print(f"round {number}: {name}: {rates[name][-1]:.2f} samples/s", flush=True)
    one, two = (
        [left / right for left, right in zip(rates[name], rates[other], strict=True)]
        for name, other in (("one worker", "plain loop"), ("two workers", "one worker"))
    )
    print(f"one worker / plain loop: {statistics.median(one):.2f} (at least 1.0 wanted)")
    print(f"two workers / one worker: {statistics.median(two):.2f} (at least 1.7 wanted)", flush=True)


def rate(samples: Iterator[Any], seconds: float) -> float:
    for _ in itertools.islice(samples, SKIPPED):
        pass
    start, count = time.perf_counter(), 0
    while (passed := time.perf_counter() - start) < seconds:
        next(samples)
        count += 1
    return count / passed


def plain(config: DataConfig) -> Iterator[Any]:
    """Row after row through the processor."""
    parameters = config.dataset_param
    processor = make_processor(config)
    rows = json.loads(Path(parameters.basic_parameters.dataset).read_text(encoding="utf-8"))
    for row in itertools.cycle(rows):
        found = parse_row(0, row, parameters.attr)
        images = [load_rgb(Path(parameters.basic_parameters.dataset_dir, name)) for name in found.images]
        messages = kit.messages(found.turns, images)
        yield processor.apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="pt")


def load(config: DataConfig) -> Iterator[Any]:
    model = kit.model_config(make_processor(config))
    return iter(build_loader(config, model_config=model))


def examining(base: Path, count: int, workers: int) -> None:
    """Rows a second and peak memory."""
    rows = json.loads((base / "train.json").read_text(encoding="utf-8"))
    path = base / "many.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            row = json.loads(json.dumps(rows[number % len(rows)]))
            row["messages"][-1]["content"] += f" This is number {number}."
            file.write(json.dumps(row) + "\n")
    found = config(base, basic={"dataset": str(path), "preprocessing_num_workers": workers})
    processor = make_processor(found)
    template = make_template(found, processor)
    ChatDataset(found.model_copy(deep=True, update={"dataset_param": _few(found)}), processor, template)  # libraries
    before, start = _peak(), time.perf_counter()
    dataset = ChatDataset(found, processor, template)
    seconds = time.perf_counter() - start
    after = _peak()
    size = dataset._samples.path.stat().st_size / 2**20
    print(
        f"examined {count} rows, {path.stat().st_size / 2**20:.0f} MiB, in {seconds:.1f} s: {count / seconds:.0f} rows/s"
    )
    print(f"peak RSS {after:.0f} MiB, with libraries and processor alone {before:.0f} MiB; Arrow file {size:.0f} MiB")
    print(f"growth {after - before:.0f} MiB (at most {GROWTH} wanted)", flush=True)


def _few(config: DataConfig) -> Any:
    basic = config.dataset_param.basic_parameters.model_copy(update={"max_samples": 20})
    return config.dataset_param.model_copy(update={"basic_parameters": basic})


def _peak() -> float:
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


if __name__ == "__main__":
    main()

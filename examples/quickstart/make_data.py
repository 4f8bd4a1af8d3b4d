"""Write the quickstart's training data: `train.json`, an `images` folder and a `data.json` with the right paths.

    python examples/quickstart/make_data.py --out build/quickstart/data --checkpoint build/quickstart/hf

`--template` is the model's conversation format: `qwen2vl` for Qwen2-VL and Qwen2.5-VL, `glm4v` for GLM-4.1V.
The photographs are copied out of the installed scikit-image wheel; nothing is downloaded. The same files every time.
"""

from __future__ import annotations

import argparse
import json
import shutil
from importlib.util import find_spec
from pathlib import Path

from captions import PHOTOS, ROWS

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=Path("build/quickstart/data"), help="folder to write")
    parser.add_argument(
        "--checkpoint",
        type=Path,
        default=Path("build/quickstart/hf"),
        help="folder of make_checkpoint.py, named in data.json",
    )
    parser.add_argument("--template", default="glm4v_moe", help="template and collator named in data.json")
    options = parser.parse_args()
    write_data(options.out, options.checkpoint, options.template)
    print(f"wrote {len(ROWS)} rows and {len(PHOTOS)} photographs to {options.out}")


def write_data(out: Path, checkpoint: Path, template: str = "glm4v_moe") -> None:
    """Copy the photographs and write train.json and data.json."""
    skimage = find_spec("skimage")
    if skimage is None:
        raise SystemExit("scikit-image is not installed: pip install scikit-image")
    (out / "images").mkdir(parents=True, exist_ok=True)
    for name in PHOTOS:
        shutil.copyfile(Path(skimage.origin).parent / "data" / name, out / "images" / name)
    (out / "train.json").write_text(json.dumps(ROWS, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    config = json.loads((HERE / "data.json").read_text(encoding="utf-8"))
    config["dataset_param"]["preprocess_parameters"]["model_name_or_path"] = str(checkpoint)
    files = {"dataset_dir": str(out), "dataset": str(out / "train.json")}
    config["dataset_param"]["basic_parameters"] |= {"template": template, **files}
    config["dataloader_param"]["collate_param"]["collator_id"] = template
    (out / "data.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

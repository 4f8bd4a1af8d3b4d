"""Write a small model as a complete Hugging Face folder: real architecture, random weights, everything made offline.

    python examples/quickstart/make_checkpoint.py --out build/quickstart/hf --dtype bf16
    python examples/quickstart/make_checkpoint.py --family qwen2_5_vl --out build/quickstart/qwen

GLM-4.5V unless `--family` names another. Four text layers and a small vision tower each; every tensor has values of its
own, biases, norms and a router's correction bias too, so that a tensor that is lost or swapped on the way shows. The
tokenizer is trained on the quickstart's captions and has the model's special tokens. The same bytes every time.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from checkpoints import FAMILIES
from checkpoints.tokenizer import make_tokenizer, save_processor
from checkpoints.weights import make_model

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
DEFAULT = "glm4v_moe"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--family", choices=FAMILIES, default=DEFAULT, help="Hugging Face's model_type")
    parser.add_argument(
        "--out", type=Path, default=Path("build/quickstart/hf"), help="folder to write; must be new or empty"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--seed", type=int, default=1234)
    options = parser.parse_args()
    write_checkpoint(options.out, family=options.family, dtype=DTYPES[options.dtype], seed=options.seed)
    print(f"wrote a small {FAMILIES[options.family].title} ({options.dtype}) to {options.out}")


def write_checkpoint(out: Path, *, family: str = DEFAULT, dtype: torch.dtype = torch.float32, seed: int = 1234) -> None:
    """Model, generation config, tokenizer, image processor and chat template into `out`, which must not hold anything yet."""
    if out.exists() and any(out.iterdir()):
        raise SystemExit(f"{out} exists and is not empty. Remove it, or give another --out.")
    tokenizer = make_tokenizer(FAMILIES[family])
    make_model(FAMILIES[family], tokenizer, dtype, seed).save_pretrained(out, max_shard_size="1MB")
    save_processor(FAMILIES[family], tokenizer, out)


if __name__ == "__main__":
    main()

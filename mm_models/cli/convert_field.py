"""What MindSpeed-MM's `mm-convert` has and this one has not: its verbs and options. An option is accepted where it says what is
done here anyway, and else refused by name with what to do instead."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any, NoReturn

from mm_models.cli.parser import StrictParser
from mm_models.errors import UserError

LORA = "Adapters are not converted: merge them into the Hugging Face weights, then hf_to_mm."
VERBS = {
    "lora_hf_to_mm": LORA,
    "lora_mm_to_hf": LORA,
    "hf_to_mm_ldt": "hf_to_mm places layers by --llm-pp-layers and --vit-pp-layers; norm and head stand on the last stage.",
    "hf_to_mm_dcp": "hf_to_dcp writes what the FSDP2 target loads, hf_to_mm what the Megatron target loads.",
}
"""Verb -> what to do instead."""

FROM_CONFIG = "config.json says it"
REFUSED = {
    "common_model_config.num_experts": FROM_CONFIG,
    "common_model_config.num_key_value_heads": FROM_CONFIG,
    "common_model_config.tie_word_embeddings": FROM_CONFIG,
    "common_model_config.llm_num_layers": FROM_CONFIG,
    "common_model_config.vit_num_layers": FROM_CONFIG,
    "common_model_config.audio_num_layers": FROM_CONFIG,
    "common_model_config.llm_hf_dir": "the decoder is read from the folder of --cfg.hf_config.hf_dir",
    "common_model_config.new_transformers_weight_key": "old and new names are found in the folder itself",
    "common_model_config.model_prefix": "old and new names are found in the folder itself",
    "llm_hf_config.hf_dir": "the decoder is read from the folder of --cfg.hf_config.hf_dir",
}
"""Option -> why it has no place here."""


def refuse_verb(converter: str, verb: str) -> None:
    """Refuse a verb of the field that is not here."""
    if verb in VERBS:
        raise UserError(f"{converter} {verb}: not supported. {VERBS[verb]}")


def field_options(parser: StrictParser, *sections: str) -> None:
    """Declare the options; `sections` are the layout's: `parallel_config`, or source and target."""
    group = parser.add_argument_group("accepted from the field where they change nothing here")

    def add(name: str, kind: Callable[[str], Any], text: str = argparse.SUPPRESS) -> None:
        group.add_argument(f"--cfg.{name}", type=kind, metavar="V", help=text)

    add("common_model_config.enable_canonical_hf_struct", _false("q, k, v and gate, up are stored fused"), "false")
    add("save_vit_only", _false("a checkpoint holds the whole model"), "false")
    add("trust_remote_code", _boolean, "no code of a folder is ever run")
    for section in sections:
        add(f"{section}.vit_tp_size", _count, "0 or tp_size: all parts have one TP")
        add(f"{section}.audio_tp_size", _none, "0: no model here has audio")
        add(f"{section}.audio_pp_layers", _none, "zeros")
    for name, why in REFUSED.items():
        add(name, _refused(why))


def check_vision_tp(args: argparse.Namespace, section: str, tp: int) -> None:
    """The field can split the vision tower by a TP of its own."""
    given = getattr(args, f"cfg.{section}.vit_tp_size", None)
    if given not in (None, 0, tp):
        raise UserError(
            f"--cfg.{section}.vit_tp_size is {given}, tp_size {tp}: all parts of a model have one TP. Leave it out."
        )


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected true or false")
    return text.lower() == "true"


def _false(why: str) -> Callable[[str], bool]:
    def read(text: str) -> bool:
        if _boolean(text):
            raise argparse.ArgumentTypeError(f"{text} is not supported: {why}. Leave it out")
        return False

    return read


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number")
    return int(text)


def _none(text: str) -> None:
    """Zero, or lists of zeros."""
    try:
        numbers = [json.loads(text)]
        while any(isinstance(number, list) for number in numbers):
            numbers = [one for number in numbers for one in (number if isinstance(number, list) else [number])]
    except ValueError:
        numbers = [text]
    if any(number not in (0, None) for number in numbers):
        raise argparse.ArgumentTypeError(f"got {text}, but no model here has an audio encoder. Leave it out")


def _refused(why: str) -> Callable[[str], NoReturn]:
    def read(text: str) -> NoReturn:
        raise argparse.ArgumentTypeError(f"not supported: {why}. Leave it out")

    return read

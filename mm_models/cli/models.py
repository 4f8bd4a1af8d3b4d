"""`mm-models`: what is registered, one entry taken apart, a model.json from a Hugging Face config, and tools around data.

    mm-models list [--table T]
    mm-models show MODEL_ID
    mm-models init --hf DIR [--tp 2 --pp 4 --vpp 1 --ep 2] [-o model.json]
    mm-models view-data --mm-data data.json --index I [--html page.html]
    mm-models tokens show | compare | dump
    mm-models convert-data llava --annotations FILE --images DIR
    mm-models make-data --samples N --out DIR

Nothing but plain strings is loaded by `list`; no command loads torch, transformers or megatron unless an entry's own module does.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mm_models.cli import convert_data, make_data, tokens, view_data
from mm_models.cli.parser import StrictParser, finish, layer_lists, positive
from mm_models.errors import UserError, nearest

PROG = "mm-models"


def _list(arguments: Sequence[str]) -> int:
    parser = StrictParser(
        prog=f"{PROG} list", description="Print the registry: table, id, and the code an id stands for."
    )
    parser.add_argument("--table", metavar="T", help="only this table")
    _plugin_option(parser)
    args = _parse(parser, arguments)
    from mm_models.registry import TABLES, table

    for name in [args.table] if args.table else TABLES:
        entries = table(name)
        for id in entries.ids():
            print(f"{name:20} {id:24} {entries.target(id)}")
    return 0


def _show(arguments: Sequence[str]) -> int:
    parser = StrictParser(
        prog=f"{PROG} show",
        description="Print every table that has MODEL_ID, and what its weight map and config map say.",
    )
    parser.add_argument("model_id", metavar="MODEL_ID")
    _plugin_option(parser)
    args = _parse(parser, arguments)
    from mm_models.config.config_map import Derived, Field, Fixed
    from mm_models.errors import unknown_name
    from mm_models.registry import TABLES, table

    found = [name for name in TABLES if args.model_id in table(name)]
    if not found:
        parts = ("vision_encoders", "vision_projectors", "text_decoders", "weight_maps")
        raise unknown_name("model_id", args.model_id, {id for name in parts for id in table(name).ids()})
    print(args.model_id)
    for name in found:
        print(f"  {name:18} {table(name).target(args.model_id)}")
    for family, config_map in _config_maps(args.model_id):
        print(f"\n{family.name}: model.json section {config_map.section}, config.json section {config_map.hf_section}")
        for field in config_map.fields:
            if isinstance(field, Field):
                default = "computed" if callable(field.default) else repr(field.default)
                factor = f" x {field.scale}" if field.scale else ""
                print(f"  {field.mm:36} {' | '.join(field.spellings)}{factor}  (absent: {default})")
            elif isinstance(field, Derived):
                print(f"  {field.mm:36} computed from {', '.join(field.spellings)}")
            elif isinstance(field, Fixed):
                print(f"  {field.mm:36} {'computed' if callable(field.value) else f'always {field.value!r}'}")
            else:
                print(f"  {'':36} {' | '.join(field.spellings)} must be {' or '.join(map(repr, field.values))}")
    if "weight_maps" in found:
        print("\nweights")
        for mm, hf, shape, shard in table("weight_maps").get(args.model_id).patterns():
            print(f"  {mm}\n      {shard:12} {shape}  <- {hf}")
    return 0


def _config_maps(model_id: str) -> list[tuple[Any, Any]]:
    """(family, config map) of every family that has a part called `model_id`."""
    from mm_models.registry import table

    families = [table("converters").get(name) for name in table("converters").ids()]
    return [
        (family, family.maps[section]) for family in families for section, ids in family.ids.items() if model_id in ids
    ]


def _init(arguments: Sequence[str]) -> int:
    parser = StrictParser(
        prog=f"{PROG} init",
        description="Write a model.json for a Hugging Face folder (only its config.json is read) and a topology.",
    )
    parser.add_argument("--hf", required=True, metavar="DIR", help="Hugging Face folder, or its config.json")
    for name, text in (
        ("tp", "tensor parallel"),
        ("pp", "pipeline stages"),
        ("vpp", "virtual chunks per stage"),
        ("ep", "expert parallel"),
        ("etp", "expert tensor parallel"),
    ):
        parser.add_argument(f"--{name}", type=positive, default=None if name == "etp" else 1, metavar="N", help=text)
    parser.add_argument(
        "--llm-pp-layers", type=layer_lists, metavar="LISTS", help="decoder layers per stage (default: balanced)"
    )
    parser.add_argument(
        "--vit-pp-layers", type=layer_lists, metavar="LISTS", help="vision layers per stage (default: all on the first)"
    )
    parser.add_argument("-o", "--out", default="-", metavar="FILE", help="where to write (default: standard output)")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing file")
    _plugin_option(parser)
    args = _parse(parser, arguments)
    from mm_models.config.family import family_of
    from mm_models.config.split import with_split
    from mm_models.config.strict import load_json
    from mm_models.layout import ParallelLayout

    path = Path(args.hf)
    path = path / "config.json" if path.is_dir() else path
    config = load_json(path)
    family = family_of(config, str(path))
    model = family.model(config, str(path))
    if unread := family.unread_keys(config):
        print(f"{path}: keys without a counterpart in model.json, not used: {', '.join(unread)}", file=sys.stderr)
    layout = ParallelLayout(tp=args.tp, pp=args.pp, vpp=args.vpp, ep=args.ep, etp=args.etp)
    model.check_layout(layout)
    split = model.split(layout, vision_layers=args.vit_pp_layers, text_layers=args.llm_pp_layers)
    content = with_split(model, split).model_dump(mode="json", exclude_none=True)
    text = json.dumps(content, indent=2) + "\n"
    if args.out == "-":
        print(text, end="")
        return 0
    if Path(args.out).exists() and not args.overwrite:
        raise UserError(f"{args.out}: exists already. Give another file, or --overwrite.")
    Path(args.out).write_text(text, encoding="utf-8")
    print(f"{args.out}: {family.model_id} for {layout.flags()}, layers {split.describe()}")
    return 0


COMMANDS = {
    "list": _list,
    "show": _show,
    "init": _init,
    "tokens": tokens.main,
    "view-data": view_data.main,
    "convert-data": convert_data.main,
    "make-data": make_data.main,
}


def _plugin_option(parser: StrictParser) -> None:
    parser.add_argument(
        "--plugin", action="append", default=[], metavar="PATH_OR_MODULE", help="adds registry entries; may be repeated"
    )


def _parse(parser: StrictParser, arguments: Sequence[str]) -> argparse.Namespace:
    args = parser.parse_strict(arguments)
    if args.plugin:
        from mm_models.registry import load_plugins

        load_plugins(args.plugin)
    return args


def _run(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"{__doc__}\n{PROG} COMMAND --help prints the options.")
        return 0 if arguments else 2
    if arguments[0] not in COMMANDS:
        close = nearest(arguments[0], COMMANDS)
        raise UserError(
            f"unknown command {arguments[0]!r}"
            + (f"; did you mean {close!r}?" if close else "")
            + f" Known: {', '.join(COMMANDS)}."
        )
    return COMMANDS[arguments[0]](arguments[1:])


def main(arguments: Sequence[str] | None = None) -> int:
    """The console script."""
    return finish(PROG, lambda: _run(sys.argv[1:] if arguments is None else arguments))


if __name__ == "__main__":
    sys.exit(main())

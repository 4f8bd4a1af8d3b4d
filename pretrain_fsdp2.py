"""Train a vision-language model with FSDP2: `torchrun pretrain_fsdp2.py config.yaml [section.key=value ...]`.

One YAML says everything; nothing here knows a model. `--check` validates it and stops, also outside torchrun and for another
platform or number of processes. Nothing heavy is imported before the command line is parsed.
"""

from __future__ import annotations

import sys

from mm_models.train.entry import run_script


def main() -> None:
    """Run and return nothing; raises what went wrong."""
    from mm_models.fsdp2.arguments import parse

    args = parse(sys.argv[1:])  # before the heavy imports: --help and typing errors answer at once
    from mm_models.config.fsdp2 import load_config

    config = load_config(args.config, args.overrides)
    from mm_models.device import device_type
    from mm_models.fsdp2 import checkpoint
    from mm_models.fsdp2.validation import plan
    from mm_models.train import log, session

    found = plan(config, args.world or session.world_size(), args.platform or device_type())
    if args.check:
        checkpoint.check_source(found)
        log.say(session.launcher_rank(), *found.lines, "check passed")
        return
    from mm_models.fsdp2.training import train

    train(found)


if __name__ == "__main__":
    sys.exit(run_script(main))

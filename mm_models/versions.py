"""The library versions this was tested with. Another one is refused by name before it can change a number unseen."""

from __future__ import annotations

from importlib.metadata import version

from mm_models.errors import UserError

SUPPORTED = {"transformers": ((5, 24), (5, 25)), "megatron-core": ((0, 16, 1), (0, 16, 2))}
"""Package -> first version that works, first that is untested. Checkpoints written by transformers 4.57 and 5.x both convert."""


def check(package: str) -> None:
    """Refuse an installed version of `package` outside its range."""
    first, end = SUPPORTED[package]
    found = version(package)
    number = tuple(int(part) for part in found.split("+")[0].split(".")[:3] if part.isdigit())
    if not first <= number < end:
        low, high = (".".join(map(str, bound)) for bound in (first, end))
        raise UserError(
            f"{package} {found} is untested here: supported is >={low},<{high}. Run: pip install '{package}>={low},<{high}'"
        )

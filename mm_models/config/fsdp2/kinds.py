"""The kinds of value the sections of the YAML share."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field

from mm_models.config import patterns
from mm_models.errors import UserError

Count = Annotated[int, Field(gt=0)]
Natural = Annotated[int, Field(ge=0)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Text = Annotated[str, Field(min_length=1)]


def _pattern(value: str) -> str:
    try:
        patterns.matcher(value)
    except UserError as error:
        raise ValueError(str(error).rstrip(".")) from error
    return value


Patterns = list[Annotated[Text, AfterValidator(_pattern)]]
"""Module patterns (`mm_models.config.patterns`), each well formed."""


def only(*allowed: Any, why: str) -> AfterValidator:
    """Accept the listed values alone: any other asks for something that will not happen."""

    def check(value: Any) -> Any:
        if value not in allowed:
            raise ValueError(f"{why}; the only accepted value is {' or '.join(map(_yaml, allowed))}")
        return value

    return AfterValidator(check)


def _yaml(value: Any) -> str:
    return {True: "true", False: "false", None: "null"}[value] if isinstance(value, bool | None) else str(value)

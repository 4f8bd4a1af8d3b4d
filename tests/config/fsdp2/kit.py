"""The published YAML and small changes of it."""

from __future__ import annotations

from pathlib import Path

SEED = Path(__file__).parents[3] / "examples" / "glm4.5v" / "glm4_5v_106B_config_v1.yaml"


def changed(folder: Path, old: str, new: str, name: str = "config.yaml") -> Path:
    """The published file with one piece of text replaced; the piece must be there once."""
    text = SEED.read_text(encoding="utf-8")
    assert text.count(old) == 1, (old, text.count(old))
    path = folder / name
    path.write_text(text.replace(old, new), encoding="utf-8")
    return path

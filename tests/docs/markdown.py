"""Reads the repository's Markdown: fenced blocks with why they are not run, commands in them, inline code and links."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
NOT_RUN = re.compile(r"<!-- not run: (.+) -->")


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block. `kind` is its info string; `reason` what the comment above it says, None when it is to be run."""

    file: Path
    line: int
    kind: str
    text: str
    reason: str | None

    @property
    def runs(self) -> bool:
        return self.kind == "bash" and self.reason is None

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """Every Markdown file of the repository, sorted."""
    return sorted(path for path in tracked() if path.suffix == ".md")


def tracked() -> list[Path]:
    """Every file of the checkout that git does not ignore; without git, every file outside hidden and build folders."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    if (ROOT / ".git").exists():
        names = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\0")
        return [ROOT / name for name in names if name and (ROOT / name).is_file()]
    skipped = ("build", "dist", "__pycache__")
    parts = (path.relative_to(ROOT).parts for path in ROOT.rglob("*") if path.is_file())
    return [ROOT.joinpath(*p) for p in parts if not any(one in skipped or one.startswith(".") for one in p[:-1])]


def blocks(path: Path) -> list[Block]:
    """The fenced blocks of a file, in order."""
    found, lines, above = [], path.read_text(encoding="utf-8").splitlines(), ""
    at = 0
    while at < len(lines):
        fence = re.fullmatch(r"```(\w*)", lines[at])
        if fence is None:
            above, at = lines[at], at + 1
            continue
        end = lines.index("```", at + 1)
        reason = NOT_RUN.fullmatch(above)
        text = "\n".join(lines[at + 1 : end])
        found.append(Block(file=path, line=at + 1, kind=fence[1], text=text, reason=reason and reason[1]))
        above, at = "", end + 1
    return found


def prose(path: Path) -> str:
    """The text outside fenced blocks."""
    return re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)


def commands(block: Block) -> Iterator[list[str]]:
    """Each command of a block as words: continued lines joined, leading NAME=value dropped, `$ ` prompts too."""
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line.removeprefix("$ "), comments=True)
        while words and re.match(r"[A-Z][A-Z0-9_]*=", words[0]):
            words.pop(0)
        if words:
            yield words


def inline_flags(path: Path) -> set[str]:
    """Long options in inline code."""
    return {flag for code in re.findall(r"`([^`]+)`", prose(path)) for flag in flags(code.split())}


def flags(words: list[str]) -> list[str]:
    """The long options among words, without their `=value`."""
    return [found[0] for word in words if (found := re.match(r"--[A-Za-z][\w.-]*", word))]


def links(path: Path) -> list[str]:
    """Targets of `[text](target)` and `![text](target)`."""
    return re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", prose(path))

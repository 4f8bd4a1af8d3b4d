"""What the pages say exists: links, options of every command, make targets, verbs, files in backticks."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT, blocks, commands, flags, inline_flags, links, pages, prose

FOREIGN = {
    "hf": {"--local-dir"},
    "modelscope": {"--model", "--local_dir"},
    "pip": {"--no-deps", "--no-build-isolation"},
    "git": set(),
}
"""Options of programs that need not be installed here."""


@cache
def options(program: str, verb: str = "") -> frozenset[str]:
    """The long options of one of this repository's programs, from the parser or from `--help`."""
    if program == "mm-convert":
        from mm_models.cli.convert import VERBS
        from mm_models.cli.parser import StrictParser

        parser = StrictParser(prog=verb)
        VERBS[verb].add(parser)
        return frozenset(name for action in parser._actions for name in action.option_strings)
    if program == "mm-models":
        return helped("-m", "mm_models.cli.models", verb)
    if program == "torchrun":
        from torch.distributed.run import get_args_parser

        return frozenset(name for action in get_args_parser()._actions for name in action.option_strings)
    if program == "pretrain_vlm.py":
        from mm_models.mcore.arguments import Arguments, option

        return frozenset({option(name) for name in Arguments.__dataclass_fields__} | {"--help"})
    if program == "pretrain_fsdp2.py":
        from mm_models.fsdp2.arguments import OPTIONS

        return frozenset(OPTIONS)
    return helped(program)


def helped(*command: str) -> frozenset[str]:
    done = subprocess.run([sys.executable, *command, "--help"], cwd=ROOT, check=True, capture_output=True, text=True)
    return frozenset(re.findall(r"--[A-Za-z][\w.-]*", done.stdout))


@cache
def every_option() -> frozenset[str]:
    """What may stand in inline code."""
    from mm_models.cli.convert import VERBS
    from mm_models.cli.models import COMMANDS

    ours = [options("mm-convert", verb) for verb in VERBS] + [options("mm-models", verb) for verb in COMMANDS]
    ours += [options("pretrain_vlm.py"), options("pretrain_fsdp2.py"), options("torchrun")]
    ours += [options(f"examples/quickstart/make_{what}.py") for what in ("checkpoint", "data")]
    return frozenset().union(*ours, *FOREIGN.values())


def split_by_program(words: list[str]) -> list[tuple[frozenset[str] | set[str], list[str]]]:
    """(options that may stand, words) of a command; torchrun's are followed by its script's."""
    program = words[0]
    if program == "torchrun":
        at = next(i for i, word in enumerate(words) if word.endswith(".py"))
        return [(options("torchrun"), words[:at]), (options(words[at]), words[at + 1 :])]
    if program in ("mm-convert", "mm-models"):
        verb = words[2] if words[1].endswith("Converter") else words[1]
        return [(options(program, verb), words[2:])]
    if program == "python" and words[1].endswith(".py"):
        return [(options(words[1]), words[2:])]
    return [(FOREIGN.get(program, set()), words[1:])] if program != "python" else []


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_option_exists(page):
    for block in blocks(page):
        for words in commands(block) if block.kind in ("bash", "console") else ():
            for known, part in split_by_program(words):
                assert set(flags(part)) <= known, f"{block}: {set(flags(part)) - known}"
    assert inline_flags(page) <= every_option(), inline_flags(page) - every_option()


SECTIONS = ("parallel", "data", "model", "features", "training", "tools")
NAMES = ("model.model.", "model.visual.", "model.language_model.")
"""How names of tensors and modules begin, which are no keys."""


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_key_of_the_yaml_exists(page):
    """In overrides of commands, and in inline code: `section.key`, `section.key=value`, `section.key: value`."""
    from mm_models.config.fsdp2 import RunConfig
    from mm_models.config.strict import check_key

    words = [word for block in blocks(page) if block.kind == "bash" for words in commands(block) for word in words]
    words += re.findall(r"`([^`]+)`", prose(page))
    for word in words:
        key = re.match(rf"((?:{'|'.join(SECTIONS)})\.[a-z_0-9.]+)(?:$|=|:)", word)
        if key and not key[1].startswith(NAMES) and not key[1].endswith(".json"):
            check_key(RunConfig, key[1], str(page.relative_to(ROOT)))


@pytest.mark.parametrize(("ending", "language"), [(".md", "en"), (".zh.md", "zh")])
def test_the_feature_table_is_the_schemas(ending, language):
    """Between its marks stands what `python -m mm_models.config.fsdp2.table` prints."""
    from mm_models.config.fsdp2 import load_config
    from mm_models.config.fsdp2.table import feature_table

    folder = ROOT / "examples" / "glm4.5v"
    text = (folder / f"README_fsdp2{ending}").read_text(encoding="utf-8")
    begin, end = "<!-- feature table: begin -->\n", "<!-- feature table: end -->\n"
    assert text.count(begin) == text.count(end) == 1
    table = text.split(begin)[1].split(end)[0]
    assert table == feature_table(load_config(folder / "glm4_5v_106B_config_v1.yaml"), language)


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_resolves(page):
    for link in links(page):
        if re.match(r"https?:|mailto:", link):
            continue
        name, _, anchor = link.partition("#")
        target = page if not name else page.parent / name
        assert target.exists(), f"{page.relative_to(ROOT)}: {link}"
        if anchor:
            assert anchor in anchors(target), f"{page.relative_to(ROOT)}: {link}; there are {sorted(anchors(target))}"


def anchors(page: Path) -> set[str]:
    """GitHub's anchors of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", prose(page), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_make_target_and_named_file_exists(page):
    """`make X`, and whatever in backticks looks like a path of this repository."""
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.M))
    text = page.read_text(encoding="utf-8")
    assert set(re.findall(r"(?:^|`)make (\w+)", text, flags=re.M)) <= targets
    for path in re.findall(r"`((?:mm_models|specs|converters|tests|docs|examples|benchmarks)/[\w./-]+)`", text):
        assert (ROOT / path).exists() or (page.parent / path).exists(), f"{page.relative_to(ROOT)}: {path}"


def test_quoted_code_is_the_code():
    """docs/add-a-model.md quotes weight tables and an FSDP2 assembly, and its plugin example works."""
    *quotes, plugin = [block.text for block in blocks(ROOT / "docs" / "add-a-model.md") if block.kind == "python"]
    files = ("converters/parts.py", "converters/glm4v_moe/text.py", "specs/parts/fsdp2.py", "specs/glm4v_moe/fsdp2.py")
    source = " ".join(word for file in files for word in (ROOT / file).read_text().split())
    for quote in quotes:
        assert " ".join(quote.split()) in source, quote
    done = subprocess.run(
        [sys.executable, "-c", f"{plugin}\nprint(table('vit_layer_specs').ids())"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert "my_vit" in done.stdout


def test_lines_are_counted():
    """CONTRIBUTING.md says how long each file of a delta is, and leaves none of its folders' files out."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    said = {path: int(lines) for path, lines in re.findall(r"^\| `([\w/.]+\.py)` \| (\d+) \|", text, re.M)}
    assert said == {path: len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in said}
    totals = [sum(map(int, re.findall(r"^\| `[\w/.]+\.py` \| (\d+) \|", part, re.M))) for part in text.split("\n### ")]
    assert [total for total in totals if total] == [int(lines) for lines in re.findall(r"\b(\d+) lines:$", text, re.M)]
    for family in ("qwen2_5_vl", "glm4v"):
        files = [path for kind in ("converters", "specs") for path in (ROOT / kind / family).glob("*.py")]
        assert {str(p.relative_to(ROOT)) for p in files if p.name != "__init__.py"} <= set(said)

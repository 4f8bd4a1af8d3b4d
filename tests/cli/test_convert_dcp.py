"""`mm-convert` for DCP as users type it: the field's long form with its variable, the short form, and what is refused."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mm_models.cli.convert import main
from mm_models.weights.dcp.folder import open_dcp
from tests.weights.folders import assert_same_folder, hf_folder, state_of


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    return hf_folder(tmp_path_factory.mktemp("hf") / "tiny")


@pytest.fixture(autouse=True)
def no_variable(monkeypatch):
    monkeypatch.delenv("GLM4V_DCP_3D", raising=False)


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def refused(capsys, *arguments: object) -> str:
    assert run(*arguments) == 2
    return capsys.readouterr().err


def layout_of(path) -> str:
    return open_dcp(path).manifest.expert_layout


def test_stacked_layout_needs_the_explicit_switch(hf, tmp_path, capsys, monkeypatch):
    """The seeds' test: without the variable the long form writes flat experts, with it stacked ones; both say so last."""
    arguments = ["ExpertMergeDcpConverter", "hf_to_dcp", "--hf_dir", hf, "--dcp_prefix", "", "--save_dir"]
    assert run(*arguments, tmp_path / "flat") == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert (
        last.startswith("experts flat (E*in, out), as GLM4V_DCP_3D unset says: for the bridged path")
        and "mm-convert hf_to_dcp" in last
    )
    assert layout_of(tmp_path / "flat") == "flat"
    monkeypatch.setenv("GLM4V_DCP_3D", "1")
    assert run(*arguments, tmp_path / "stacked") == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("experts stacked (E, in, out), as GLM4V_DCP_3D=1 says")
    assert layout_of(tmp_path / "stacked") == "stacked"
    assert "GLM4V_DCP_3D=1 means expert layout stacked, but flat was asked for" in refused(
        capsys, *arguments, tmp_path / "no", "--expert-layout", "flat"
    )
    for value in ("true", "0", ""):
        monkeypatch.setenv("GLM4V_DCP_3D", value)
        assert f"GLM4V_DCP_3D is {value!r}; it takes 1" in refused(capsys, *arguments, tmp_path / "no")
    assert not (tmp_path / "no").exists()


def test_the_fields_round_trip(hf, tmp_path, monkeypatch):
    monkeypatch.setenv("GLM4V_DCP_3D", "1")
    dcp, out = tmp_path / "dcp", tmp_path / "out"
    assert run("ExpertMergeDcpConverter", "hf_to_dcp", "--hf_dir", hf, "--save_dir", dcp, "--dcp_prefix", "") == 0
    arguments = ["--hf_dir", hf, "--dcp_dir", dcp, "--save_dir", out, "--dcp_prefix", "", "--hf_prefix", ""]
    assert run("ExpertMergeDcpConverter", "dcp_to_hf", *arguments) == 0
    assert_same_folder(out, hf)


def test_the_short_form(hf, tmp_path, capsys, monkeypatch):
    dcp, mm, two, out = (tmp_path / name for name in ("dcp", "mm", "two", "out"))
    assert run("hf_to_dcp", "--hf", hf, "--out", dcp) == 0
    assert "90 tensors" in capsys.readouterr().out and layout_of(dcp) == "stacked_hf"
    assert run("dcp_to_mm", "--dcp", dcp, "--out", mm, "--tp", 2, "--ep", 2) == 0
    assert run("mm_to_dcp", "--mm", mm, "--out", two, "--hf", hf, "--expert-layout", "flat") == 0
    assert run("dcp_to_hf", "--dcp", two / "release", "--hf", hf, "--out", out) == 0
    assert_same_folder(out, hf)
    capsys.readouterr()
    assert run("check", dcp, mm) == 0 and run("check", two, hf) == 0 and run("inspect", dcp) == 0
    assert "68 tensors compared, all equal" in capsys.readouterr().out
    monkeypatch.setenv("GLM4V_DCP_3D", "1")
    assert "means expert layout stacked, but stacked_hf was asked for" in refused(
        capsys, "hf_to_dcp", "--hf", hf, "--out", tmp_path / "no"
    )


def test_experts_are_merged_and_split(hf, tmp_path, capsys, monkeypatch):
    flat, stacked = tmp_path / "flat", tmp_path / "stacked"
    name = "model.language_model.layers.1.mlp.experts.gate_up_proj"
    assert run("moe_expert", "--style", "merge", "--hf_dir", hf, "--save_dir", flat) == 0
    assert (
        capsys.readouterr().out.splitlines()[-1] == "experts flat, as GLM4V_DCP_3D unset says (--expert-layout chooses)"
    )
    assert state_of(flat)[name].shape == (512, 96)
    monkeypatch.setenv("GLM4V_DCP_3D", "1")
    assert run("moe_expert", "--style", "merge", "--hf_dir", hf, "--save_dir", stacked) == 0
    assert state_of(stacked)[name].shape == (8, 64, 96)
    for number, source in enumerate((flat, stacked)):
        assert run("moe_expert", "--style", "split", "--hf_dir", source, "--save_dir", tmp_path / f"split{number}") == 0
        assert state_of(tmp_path / f"split{number}").keys() == state_of(hf).keys()
    assert "its experts are merged as flat" in refused(capsys, "hf_to_mm", "--hf", flat, "--out", tmp_path / "no")
    assert "--style split writes per_expert" in refused(
        capsys, "moe_expert", "--style", "split", "--hf", flat, "--out", tmp_path / "no", "--expert-layout", "flat"
    )


def test_verbs_and_options_that_do_not_exist_are_refused(hf, tmp_path, capsys):
    assert "expected hf_to_dcp or dcp_to_hf" in refused(
        capsys, "ExpertMergeDcpConverter", "hf_to_mm", "--hf", hf, "--out", tmp_path
    )
    assert "did you mean '--dcp_prefix'" in refused(
        capsys, "hf_to_dcp", "--hf", hf, "--out", tmp_path, "--dcp_prefx", "x"
    )
    assert "is given twice (as --hf)" in refused(
        capsys, "hf_to_dcp", "--hf", hf, "--hf_dir", hf, "--out", tmp_path / "x"
    )


def test_neither_torch_nor_transformers_is_loaded(hf, tmp_path):
    code = (
        "import sys; from mm_models.cli.convert import main; status = main(sys.argv[1:]);"
        "print(status, sorted({n.split('.')[0] for n in sys.modules} & {'torch', 'transformers', 'megatron', 'safetensors'}))"
    )
    for arguments in (
        ["hf_to_dcp", "--hf", hf, "--out", tmp_path / "dcp", "--expert-layout", "stacked"],
        ["dcp_to_hf", "--dcp", tmp_path / "dcp", "--hf", hf, "--out", tmp_path / "back"],
        ["check", tmp_path / "dcp", hf],
    ):
        done = subprocess.run(
            [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=True
        )
        assert done.stdout.splitlines()[-1] == "0 []", done.stderr

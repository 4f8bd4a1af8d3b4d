"""`mm-convert` as users type it: the field's long form, the short form, and everything it refuses."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mm_models.cli.convert import VERBS, main
from mm_models.cli.models import main as models_main
from mm_models.weights.check import compare
from mm_models.weights.manifest import open_checkpoint
from tests.weights.folders import assert_same_folder, hf_folder


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    return hf_folder(tmp_path_factory.mktemp("hf") / "tiny")


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def test_the_fields_long_form(hf, tmp_path, capsys):
    mm, out, two = tmp_path / "mm", tmp_path / "out", tmp_path / "two"
    layout = ["--cfg.parallel_config.llm_pp_layers", "[[2,2]]", "--cfg.parallel_config.vit_pp_layers", "[[2,0]]"]
    layout += ["--cfg.parallel_config.tp_size", "2", "--cfg.parallel_config.ep_size", "2"]
    assert run("Glm4vMoeConverter", "hf_to_mm", "--cfg.mm_dir", mm, "--cfg.hf_config.hf_dir", hf, *layout) == 0
    line = capsys.readouterr().out.strip()
    assert "148 tensors" in line and "bytes read" in line and "MB/s" in line and "peak RSS" in line
    manifest = open_checkpoint(mm).manifest
    assert (manifest.layout.tp, manifest.layout.pp, manifest.layout.ep, manifest.layout.etp) == (2, 2, 2, 2)
    assert (
        run(
            "Glm4vMoeConverter",
            "mm_to_hf",
            "--cfg.mm_dir",
            mm,
            "--cfg.hf_config.hf_dir",
            hf,
            "--cfg.save_hf_dir",
            out,
            *layout,
        )
        == 0
    )
    assert_same_folder(out, hf)
    target = ["--cfg.target_parallel_config.llm_pp_layers", "[1,1,1,1]"]
    target += ["--cfg.target_parallel_config.vit_pp_layers", "[2,0,0,0]", "--cfg.target_parallel_config.tp_size", "1"]
    source = ["--cfg.source_parallel_config.llm_pp_layers", "[2,2]"]
    source += ["--cfg.source_parallel_config.vit_pp_layers", "[2,0]", "--cfg.source_parallel_config.tp_size", "2"]
    assert run("Glm4vMoeConverter", "resplit", "--cfg.source_dir", mm, "--cfg.target_dir", two, *source, *target) == 0
    assert open_checkpoint(two).manifest.split.text.nested() == [[1, 1, 1, 1]]
    assert compare(two, mm).equal


def test_the_short_form(hf, tmp_path, capsys):
    mm, two, out = tmp_path / "mm", tmp_path / "two", tmp_path / "out"
    assert run("hf_to_mm", "--hf", hf, "--out", mm, "--tp", 2, "--pp", 2, "--ep", 2) == 0
    assert "layers per stage: vision [[2, 0]], text [[2, 2]]" in capsys.readouterr().err
    assert run("resplit", "--mm", mm, "--out", two, "--tp", 1, "--pp", 4) == 0
    assert run("mm_to_hf", "--mm", two, "--hf", hf, "--out", out, "--jobs", 1) == 0
    assert run("check", out, hf) == 0
    assert run("check", mm, hf) == 0
    assert "68 tensors compared, all equal" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "layout"),
    [
        (["--llm-pp-layers", "[2,2]", "--vit-pp-layers", "[2,0]"], (2, 1)),
        (["--llm-pp-layers", "[[2,2]]"], (2, 1)),
        (["--llm-pp-layers=[[1,1],[1,1]]", "--vit-pp-layers=[[2,0],[0,0]]"], (2, 2)),
        (["--pp", "2", "--vpp", "2"], (2, 2)),
        (["--vpp", "2", "--llm-pp-layers", "[1,1,1,1]", "--vit-pp-layers", "[2,0,0,0]"], (2, 2)),
        (["--cfg.parallel_config.vit_pp_layers", "[[1,1]]", "--cfg.parallel_config.llm_pp_layers", "[[0,4]]"], (2, 1)),
    ],
)
def test_flat_and_nested_lists_mean_the_same(hf, tmp_path, arguments, layout):
    assert run("hf_to_mm", "--hf", hf, "--out", tmp_path / "mm", *arguments) == 0
    manifest = open_checkpoint(tmp_path / "mm").manifest
    assert (manifest.layout.pp, manifest.layout.vpp) == layout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["hf_to_m"], "unknown verb 'hf_to_m'; did you mean 'hf_to_mm'?"),
        (["Glm4vMoConverter", "hf_to_mm", "--hf", "a", "--out", "b"], "did you mean 'Glm4vMoeConverter'?"),
        (["Glm4vMoeConverter", "hf_mm"], "did you mean 'hf_to_mm'?"),
        (["Glm4vMoeConverter"], "expected one of hf_to_mm"),
        (["hf_to_mm", "--hf", "a", "--out", "b", "--tpp", "2"], "unknown option '--tpp'; did you mean '--tp'?"),
        (
            ["hf_to_mm", "--hf", "a", "--out", "b", "--cfg.parallel_config.tp", "2"],
            "did you mean '--cfg.parallel_config.tp_size'?",
        ),
        (
            ["hf_to_mm", "--hf", "a", "--out", "b", "--cfg.parallel_config.llm_pp_layer", "[1]"],
            "did you mean '--cfg.parallel_config.llm_pp_layers'?",
        ),
        (["hf_to_mm", "--hf", "a", "--out", "b", "--TP", "2"], "did you mean '--tp'?"),
        (["hf_to_mm", "--hf", "a", "--out", "b", "--llm_pp_layers", "[1]"], "did you mean '--llm-pp-layers'?"),
        (["hf_to_mm", "--hf", "a", "--hf", "c", "--out", "b"], "option '--hf' is given twice; keep one"),
        (["hf_to_mm", "--hf", "a", "--cfg.hf_config.hf_dir=c", "--out", "b"], "given twice (as --hf)"),
        (["hf_to_mm", "--hf", "a"], "required: --out"),
        (["hf_to_mm", "--hf", "a", "--out", "b", "--tp", "0"], "got '0', expected a whole number of at least 1"),
        (["hf_to_mm", "--hf", "a", "--out", "b", "--tp", "two"], "got 'two'"),
        (["hf_to_mm", "--hf", "a", "--out", "b", "--llm-pp-layers", "12,16"], "expected a list such as '[12,16]'"),
        (["hf_to_mm", "--hf", "a", "--out", "b", "stray"], "unrecognized arguments: stray"),
        (["hf_to_mm", "--hf", "/nowhere", "--out", "b"], "/nowhere: no such folder"),
        (["mm_to_hf", "--mm", "/nowhere", "--hf", "a", "--out", "b"], "/nowhere: no such folder"),
        (["check", "a"], "required: B"),
        (["patterns", "glm4v_vitt"], "did you mean 'glm4v_vit'?"),
        (["inspect", "/nowhere"], "/nowhere: no such folder"),
        (["patterns", "glm4v_vit", "--plugin", "/nowhere.py"], "plugin '/nowhere.py': no such file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refusals_are_one_line_and_status_2(capsys, arguments, words):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert words in error and error.startswith("mm-convert: error: ") and "Traceback" not in error


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--tp", "4"], "kv heads) 2 does not divide by tp 4"),
        (["--ep", "3"], "num_moe_experts 8 does not divide by ep 3 (possible: 1, 2, 4, 8)"),
        (["--llm-pp-layers", "[2,1]"], "sum 3, model 4"),
        (["--pp", "3", "--llm-pp-layers", "[2,2]"], "expected 3: one count per pipeline stage"),
        (["--llm-pp-layers", "[[2,2]]", "--vit-pp-layers", "[[2,0],[0,0]]"], "expected 1: one per virtual chunk"),
    ],
    ids=str,
)
def test_layouts_that_do_not_fit_are_refused_before_any_file(hf, tmp_path, capsys, options, words):
    assert run("hf_to_mm", "--hf", hf, "--out", tmp_path / "mm", *options) == 2
    assert words in capsys.readouterr().err and not (tmp_path / "mm").exists()


def test_a_stated_source_layout_is_checked_against_the_manifest(hf, tmp_path, capsys):
    mm = tmp_path / "mm"
    run("hf_to_mm", "--hf", hf, "--out", mm, "--tp", 2, "--pp", 2)
    for options, words in (
        (["--source-tp", "1"], "tp 1 given, 2 there"),
        (["--cfg.source_parallel_config.llm_pp_layers", "[1,3]"], "llm_pp_layers [1, 3] given, [[2, 2]] there"),
        (["--source-pp", "4", "--source-ep", "2"], "pp 4 given, 2 there; ep 2 given, 1 there"),
    ):
        assert run("resplit", "--mm", mm, "--out", tmp_path / "two", *options) == 2
        assert words in capsys.readouterr().err
    assert (
        run(
            "resplit",
            "--mm",
            mm,
            "--out",
            tmp_path / "two",
            "--source-tp",
            2,
            "--cfg.source_parallel_config.llm_pp_layers",
            "[2,2]",
        )
        == 0
    )


def test_layer_lists_come_from_the_model_json_and_may_not_contradict_it(hf, tmp_path, capsys):
    model = tmp_path / "model.json"
    init = [
        "init",
        "--hf",
        str(hf),
        "--pp",
        "2",
        "--llm-pp-layers",
        "[1,3]",
        "--vit-pp-layers",
        "[2,0]",
        "-o",
        str(model),
    ]
    assert models_main(init) == 0
    assert run("hf_to_mm", "--hf", hf, "--out", tmp_path / "mm", "--model", model, "--tp", 2) == 0
    manifest = open_checkpoint(tmp_path / "mm").manifest
    assert (manifest.layout.pp, manifest.split.text.nested()) == (2, [[1, 3]])
    assert run("hf_to_mm", "--hf", hf, "--out", tmp_path / "no", "--model", model, "--llm-pp-layers", "[[2,2]]") == 2
    assert "llm_pp_layers is [[2, 2]]" in capsys.readouterr().err
    assert run("hf_to_mm", "--hf", hf, "--out", tmp_path / "no", "--model", model, "--pp", "4") == 2
    assert "expected 4: one count per pipeline stage" in capsys.readouterr().err and not (tmp_path / "no").exists()


def test_check_says_what_differs_and_exits_1(hf, tmp_path, capsys):
    run("hf_to_mm", "--hf", hf, "--out", tmp_path / "mm", "--tp", 2)
    entry = open_checkpoint(tmp_path / "mm").manifest.tensors[3]
    file = tmp_path / "mm/release" / entry.file
    data = bytearray(file.read_bytes())
    data[entry.offset] ^= 1
    file.write_bytes(data)
    capsys.readouterr()
    assert run("check", hf, tmp_path / "mm") == 1
    assert entry.name in capsys.readouterr().out


def test_patterns_prints_the_map(capsys):
    assert run("patterns", "glm4v_moe_lm") == 0
    text = capsys.readouterr().out
    assert (
        "text_decoder.decoder.layers.{layer}.self_attention.linear_qkv.bias [qkv_bias]" in text and "kv_groups" in text
    )
    assert (
        "model.language_model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight" in text and "lm_head.weight" in text
    )


def test_a_plugin_adds_a_weight_map(tmp_path, capsys):
    plugin = tmp_path / "my_plugin.py"
    plugin.write_text(
        "from mm_models.registry import table\n"
        "from converters.glm4v_moe.vision import WEIGHTS\n"
        "table('weight_maps').add('my_vit', 'my_plugin:WEIGHTS')\n"
    )
    code = f"from mm_models.cli.convert import main; raise SystemExit(main(['patterns', 'my_vit', '--plugin', {str(plugin)!r}]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "patch_embed.proj.weight" in done.stdout, done.stderr


@pytest.mark.parametrize("arguments", [["--help"], *([verb, "--help"] for verb in VERBS)], ids=" ".join)
def test_help_is_quick_and_imports_nothing_heavy(arguments):
    code = (
        "import sys\nfrom mm_models.cli.convert import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "print(sorted({n.split('.')[0] for n in sys.modules} & {'torch', 'transformers', 'megatron', 'numpy', 'pydantic'}))"
    )
    start = os.times()
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    used = os.times()
    assert done.stdout.splitlines()[-1] == "[]"
    assert "usage" in done.stdout or "Verbs" in done.stdout
    assert used.children_user + used.children_system - start.children_user - start.children_system < 1.0


def test_conversion_leaves_torch_and_megatron_alone(hf, tmp_path):
    code = (
        "import sys\nfrom mm_models.cli.convert import main\n"
        "assert main(sys.argv[1:]) == 0\n"
        "print(sorted({n.split('.')[0] for n in sys.modules} & {'torch', 'transformers', 'megatron'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "hf_to_mm", "--hf", str(hf), "--out", str(tmp_path / "mm")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "[]"

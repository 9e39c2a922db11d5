"""`fuse --gguf` and `export --format gguf --merge`, with fakes of llama.cpp's programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

gguf = pytest.importorskip(
    "gguf", reason="needs the gguf package: pip install 'mlxtune-lora[gguf]'"
)

from mlxtune import TrainConfig, train  # noqa: E402
from tests.command import Cli, files_in  # noqa: E402
from tests.models import sums, write_chat, write_model  # noqa: E402
from tests.paths import DATA, ROOT  # noqa: E402
from tests.slow import slow  # noqa: E402

pytestmark = pytest.mark.usefixtures("short_checks")
# A fake converter, which writes a folder's model or fails as `fault` says.
CONVERTER = """#!{python}
import sys
sys.path.insert(0, {root!r})
from pathlib import Path
import numpy as np
from tests.interop import base_gguf
folder, _, target, _, kind = sys.argv[1:]
assert kind == "f32"
if {fault!r} == "fails":
    print("INFO: loading", file=sys.stderr)
    sys.exit("NotImplementedError: Architecture 'X' not supported!")
if {fault!r} == "lacks torch":
    sys.exit("ModuleNotFoundError: No module named 'torch'")
if {fault!r} == "cut":
    Path(target).write_bytes(b"GGUF")
    sys.exit()
if {fault!r} == "other":
    interleaved = base_gguf.interleaved
    base_gguf.interleaved = lambda weight, heads: interleaved(weight, heads) * np.float32(1.001)
base_gguf.write_base_gguf(Path(folder), Path({vocabulary!r}), Path(target))
"""


# A fake quantizer that copies the file instead of rounding it.
QUANTIZER = """#!{python}
import shutil, sys
plain, target, kind = sys.argv[1:]
if kind != "Q4_K_M":
    sys.exit(f"llama_quantize: invalid ftype '{{kind}}'")
shutil.copyfile(plain, target)
with open(target, "ab") as file:
    file.write(b"rounded")
{fault}
"""
MERGE = ("--format", "gguf", "--merge")
GET_CONVERTER = (
    "git clone https://github.com/ggml-org/llama.cpp, put the clone on the PATH, pip install torch"
)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    return trained(folder, write_model(folder / "model", "llama"))


def trained(folder: Path, model: Path) -> Path:
    rows = write_chat(folder / "chat.jsonl", sums(8))
    output = folder / "out" / "adapters.safetensors"
    options = {"targets": ("all",), "lr": 1e-2, "max_steps": 2, "samples": 0, "quiet": True}
    train(TrainConfig(str(model), (str(rows),), output=str(output), **options))
    return output.parent


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def write(fault: str = "", *, quantizer: bool = False, rounding: str = "") -> None:
        program = tmp_path / "bin" / "convert_hf_to_gguf.py"
        program.parent.mkdir()
        places = {"root": str(ROOT), "vocabulary": str(DATA / "demo-gemma3/tokenizer.model")}
        program.write_text(CONVERTER.format(python=sys.executable, fault=fault, **places))
        program.chmod(0o755)
        if quantizer:
            other = program.with_name("llama-quantize")
            other.write_text(QUANTIZER.format(python=sys.executable, fault=rounding))
            other.chmod(0o755)
        monkeypatch.setenv("PATH", str(program.parent))

    return write


def test_merged_file_has_the_weights_of_the_folder(
    cli: Cli, adapter: Path, tmp_path: Path, install: Callable[..., None]
) -> None:
    install()
    output = tmp_path / "fused"
    outcome = cli("fuse", "--adapter", adapter, "--output", output, "--gguf")
    assert outcome.code == 0, outcome.err
    assert "14 fused weights equal to the folder's" in outcome.err
    tensors = {
        tensor.name: tensor.data for tensor in gguf.GGUFReader(output / "model.gguf").tensors
    }
    weights = mx_load(output / "model.safetensors")
    np.testing.assert_array_equal(
        tensors["blk.1.ffn_up.weight"], weights["model.layers.1.mlp.up_proj.weight"]
    )
    assert "model.gguf" in json.loads((output / "certificate.json").read_text())["files"]


def mx_load(path: Path) -> dict[str, np.ndarray]:
    import safetensors.numpy

    return safetensors.numpy.load_file(path)


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        (
            "fails",
            "failed (NotImplementedError: Architecture 'X' not supported!): leave out --gguf",
        ),
        slow("lacks torch", f"(ModuleNotFoundError: No module named 'torch'): {GET_CONVERTER}"),
        slow("cut", "the gguf package cannot read what llama.cpp's converter wrote"),
        ("other", "model.gguf: blk.0.attn_k.weight differs from model.layers.0.self_attn.k_proj"),
    ],
)
def test_conversion_that_fails_is_one_line_and_leaves_nothing(
    cli: Cli, adapter: Path, tmp_path: Path, install: Callable[..., None], fault: str, line: str
) -> None:
    install(fault)
    options = ["--output", tmp_path / "fused", "--gguf", "--quiet"]
    outcome = cli("fuse", "--adapter", adapter, *options)
    assert line in outcome.error
    assert [path.name for path in tmp_path.iterdir()] == ["bin"]


def test_without_the_converter_its_command_is_printed(
    cli: Cli, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    output = tmp_path / "fused"
    outcome = cli("fuse", "--adapter", adapter, "--output", output, "--gguf")
    assert outcome.code == 0, outcome.err
    assert (
        f"llama.cpp's converter is not on the PATH: {GET_CONVERTER}, then run "
        f"convert_hf_to_gguf.py {output} --outfile {output}/model.gguf --outtype f32"
    ) in outcome.err
    assert (output / "certificate.json").is_file()


@pytest.mark.slow
def test_quantized_base_is_written_plain(
    cli: Cli, tmp_path: Path, install: Callable[..., None]
) -> None:
    install()
    model = write_model(tmp_path / "model", "llama", quantize=4)
    output = tmp_path / "fused"
    outcome = cli("fuse", "--adapter", trained(tmp_path, model), "--output", output, "--gguf")
    assert outcome.code == 0, outcome.err
    assert "llama.cpp needs plain weights: writing them, as with --dequantize" in outcome.err
    assert "quantization" not in json.loads((output / "config.json").read_text())
    assert (output / "model.gguf").is_file()


def test_model_that_gguf_has_no_names_for_is_refused_at_once(cli: Cli, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "olmo2")
    adapter = trained(tmp_path, model)
    outcome = cli("fuse", "--adapter", adapter, "--output", tmp_path / "fused", "--gguf")
    assert outcome.error.startswith("--gguf supports llama, qwen2")
    assert not (tmp_path / "fused").exists()


def test_merged_export_is_one_rounded_file_whose_plain_weights_were_proved(
    cli: Cli, adapter: Path, tmp_path: Path, install: Callable[..., None]
) -> None:
    install(quantizer=True)
    output = tmp_path / "o"
    options = ["--adapter", adapter, "--output", output, "--quantize", "Q4_K_M"]
    outcome = cli("export", *MERGE, *options)
    assert outcome.code == 0, outcome.err
    assert "14 fused weights equal to the folder's" in outcome.err
    assert "rounded to Q4_K_M: the proof does not cover the rounded weights" in outcome.out
    assert files_in(output) == ["Modelfile", "certificate.json", "model.gguf"]
    assert (output / "Modelfile").read_text() == "FROM ./model.gguf\n"
    assert (output / "model.gguf").read_bytes().endswith(b"rounded")
    certificate = json.loads((output / "certificate.json").read_text())
    assert certificate["passed"]
    assert (certificate["format"], certificate["quantized"]) == ("gguf", "Q4_K_M")
    assert certificate["files"].keys() == {"Modelfile", "model.gguf"}
    again = ["--adapter", adapter, "--output", tmp_path / "p", "--quantize", "Q9"]
    assert "failed (llama_quantize: invalid ftype 'Q9'): choose another --quantize" in (
        cli("export", *MERGE, *again, "--quiet").error
    )
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize(
    "fault",
    [
        "shutil.copyfile(plain, target)",
        slow("open(target, 'w').write('no GGUF')"),
        slow("import os; os.remove(target); os.symlink(plain, target)"),
    ],
)
def test_invalid_quantized_file_is_refused(
    cli: Cli, adapter: Path, tmp_path: Path, install: Callable[..., None], fault: str
) -> None:
    install(quantizer=True, rounding=fault)
    options = ["--adapter", adapter, "--output", tmp_path / "o", "--quantize", "Q4_K_M"]
    outcome = cli("export", *MERGE, *options)
    assert outcome.code == 1
    assert "llama-quantize: " in outcome.err and "choose another --quantize" in outcome.err
    assert not (tmp_path / "o").exists()


def test_merged_export_without_quantizer_is_plain_for_ollama(
    cli: Cli, adapter: Path, tmp_path: Path, install: Callable[..., None]
) -> None:
    install()
    output = tmp_path / "o"
    options = ["--adapter", adapter, "--output", output, "--quantize", "Q4_K_M"]
    outcome = cli("export", *MERGE, *options)
    assert outcome.code == 0, outcome.err
    assert (
        "llama-quantize is not on the PATH, so model.gguf is not quantised: brew install "
        f"llama.cpp, or run ollama create -q Q4_K_M NAME -f {output}/Modelfile"
    ) in outcome.err
    assert files_in(output) == ["Modelfile", "certificate.json", "model.gguf"]
    assert "quantized" not in json.loads((output / "certificate.json").read_text())


def test_merged_export_without_llama_cpp_is_a_model_folder_for_ollama(
    cli: Cli, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    output = tmp_path / "o"
    outcome = cli("export", *MERGE, "--adapter", adapter, "--output", output)
    assert outcome.code == 0, outcome.err
    assert (
        "convert_hf_to_gguf.py is not on the PATH, so a model folder is written instead: "
        f"{GET_CONVERTER}, or run ollama create NAME -f {output}/Modelfile"
    ) in outcome.err
    assert (output / "Modelfile").read_text() == "FROM .\n"
    assert (output / "model.safetensors").is_file()
    assert json.loads((output / "certificate.json").read_text())["format"] == "fused"

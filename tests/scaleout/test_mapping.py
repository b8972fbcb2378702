"""The knob table towards vLLM: what is mapped, what is refused, and that vLLM's own parser accepts all of it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from soloist.checkpoint.reader import open_checkpoint
from soloist.cli import app
from soloist.errors import CapacityError, SettingError
from soloist.scaleout import dense
from soloist.scaleout.launch import Command, command, find_executable
from soloist.scaleout.mapping import TABLE, Asked, Cannot, Have, translate
from soloist.settings import KNOBS, resolve

MODEL = Path(__file__).parents[2] / "src/soloist/demo"
PARSE = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
out = []
for argv in json.load(sys.stdin):
    args = parser.parse_args(argv)
    validate_parsed_serve_args(args)
    out.append({k: repr(v) for k, v in vars(args).items()})
print("\\nRESULT" + json.dumps(out))
"""


def made(flags: dict[str, str], device: str = "cuda", directory: Path = MODEL, **more) -> Command:
    return command(resolve(flags, {}, {}), directory, device=device, **more)


def asked(device: str = "cuda", *, has_mtp: bool = True, drafter: str | None = None, **values) -> Asked:
    return Asked(values, frozenset(values), device, has_mtp, drafter)


def after(options: tuple[str, ...], flag: str) -> str:
    return options[options.index(flag) + 1]


def test_defaults_keep_port_parsers_and_state_type():
    argv = made({}).argv
    assert argv[:3] == ("vllm", "serve", str(MODEL))
    assert after(argv, "--port") == "18020" and after(argv, "--host") == "127.0.0.1"
    assert after(argv, "--tool-call-parser") == "qwen3_coder" and after(argv, "--reasoning-parser") == "qwen3"
    assert after(argv, "--mamba-ssm-cache-dtype") == "float32" and after(argv, "--served-model-name") == "demo"
    assert json.loads(after(argv, "--speculative-config"))["model"] == str(MODEL / "dflash2")
    assert "--max-num-seqs" not in argv and "--enforce-eager" not in argv


def test_values_are_carried_over():
    argv = made({"max_len": "4096", "served_name": "a,b", "port": "9000", "max_seqs": "64", "max_queue": "10"}).argv
    assert after(argv, "--max-model-len") == "4096" and after(argv, "--max-num-seqs") == "64"
    assert argv[argv.index("--served-model-name") + 1 :][:2] == ("a", "b") and after(argv, "--port") == "9000"
    assert after(argv, "--max-num-queued-reqs") == "10"
    assert after(made({}, tensor_parallel=4).argv, "--tensor-parallel-size") == "4"


def test_a_key_goes_through_the_environment_and_is_not_printed():
    one = made({"api_key": "sesame"})
    assert one.environment["VLLM_API_KEY"] == "sesame" and "sesame" not in one.shown()
    with pytest.raises(SettingError, match="one key"):
        made({"api_key": "a,b"})


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ({"sampler": "coupled"}, "not coupled"),
        ({"linear": "prepacked"}, "own kernels"),
        ({"tree": "1"}, "one chain"),
        ({"ctx": "huge"}, "no KVarN"),
        ({"kv_format_v": "int8"}, "one format"),
        ({"session_dir": "/s"}, "no counterpart"),
        ({"block_rule": "gain"}, "no counterpart"),
        ({"reasoning_fields": "reasoning_content"}, "`reasoning` only"),
        ({"prefill_slice_ms": "100"}, "no counterpart"),
        ({"max_body_mb": "5"}, "no counterpart"),
    ],
)
def test_what_vllm_cannot_do_is_refused_with_the_reason(flags, word):
    with pytest.raises(SettingError, match=word) as caught:
        made(flags)
    assert caught.value.remedy


def test_speculation():
    def config(**values) -> dict:
        return json.loads(after(translate(asked(**values)).options, "--speculative-config"))

    assert config(spec="mtp") == {"method": "mtp", "num_speculative_tokens": 4}
    assert config(spec="mtp", draft_tokens=2)["num_speculative_tokens"] == 2
    assert config(spec="dflash2", drafter="/d", dflash_tokens=15) == {
        "method": "dflash",
        "model": "/d",
        "num_speculative_tokens": 15,
    }
    assert config(spec="none", lookup=True)["method"] == "ngram"
    assert config(spec="auto")["method"] == "mtp"
    assert config(spec="auto", drafter="/d")["method"] == "dflash"
    assert config(device="cpu", spec="mtp", drafter="/d", draft_sample=True) == {
        "method": "mtp",
        "num_speculative_tokens": 4,
        "draft_sample_method": "probabilistic",
    }
    assert "--speculative-config" not in translate(asked(spec="none")).options
    assert "--speculative-config" not in translate(asked(spec="auto", has_mtp=False)).options
    assert "--speculative-config" not in translate(asked("cpu", spec="auto", drafter="/d")).options
    assert "temperature 0" in translate(asked("cpu", spec="mtp")).remark
    for values, word in [
        ({"spec": "dflash2", "drafter": "/d", "device": "cpu"}, "CPU build"),
        ({"spec": "dflash2"}, "drafter's directory"),
        ({"spec": "mtp", "lookup": True}, "fuse"),
        ({"tree": True}, "one chain"),
        ({"spec": "mtp", "has_mtp": False}, "no MTP module"),
        ({"verify_rows": 8}, "no counterpart"),
        ({"kv_format": "kvarn"}, "no KV format kvarn"),
    ]:
        with pytest.raises(SettingError, match=word):
            translate(asked(**{"device": "cuda", **values}))


def test_prefix_cache_on_a_cpu_gives_way_to_speculation():
    assert "--enable-prefix-caching" in translate(asked(prefix_cache=True)).options
    have = translate(asked("cpu", spec="mtp", prefix_cache=True))
    assert "--no-enable-prefix-caching" in have.options and "CPU" in have.remark
    assert after(translate(asked(kv_format="int8")).options, "--kv-cache-dtype") == "int8_per_token_head"


def test_every_row_gives_a_verdict_for_the_default_of_its_knob():
    settings = resolve({}, {}, {})
    for name in KNOBS:
        if name in TABLE:
            got = TABLE[name](getattr(settings, name), asked())
            assert isinstance(got, (Have, Cannot)), name
    translate(Asked({n: getattr(settings, n) for n in KNOBS}, frozenset(), "cuda"))


def test_serve_prints_the_command_without_vllm_installed():
    arguments = ["serve", "demo", "--engine", "vllm", "--dry-run", "--max-len", "2048"]
    done = CliRunner().invoke(app, [*arguments, "--device", "cuda"])
    assert done.exit_code == 0, done.output
    line = done.output.strip().splitlines()[-1]
    assert " serve " in line and "--max-model-len 2048" in line
    done = CliRunner().invoke(app, ["serve", "demo", "--dry-run"])
    assert done.exit_code == 2 and "--engine vllm" in done.stderr


def test_a_cpu_gets_a_dense_copy_with_the_same_values(tmp_path, monkeypatch):
    monkeypatch.setattr(dense, "CACHE", tmp_path / "cache")
    arguments = ["serve", "demo", "--engine", "vllm", "--dry-run", "--device", "cpu"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0 and "dense copy" in done.stderr, done.output
    copy = Path(done.stdout.strip().splitlines()[-1].split(" serve ")[1].split()[0])
    assert copy.is_relative_to(tmp_path / "cache")
    opened, original = open_checkpoint(copy), open_checkpoint(MODEL)
    assert {row.form for row in opened.summary()} == {"dense"} and opened.has_mtp
    assert sum(r.parameters for r in opened.summary()) == sum(r.parameters for r in original.summary())
    for name in ("layers.0.mlp.up_proj.weight", "embed_tokens.weight", "mtp.fc.weight", "norm.weight"):
        assert torch.equal(opened.tensor(name), original.tensor(name).to(torch.bfloat16)), name
    stamp = (copy / "model.safetensors").stat().st_mtime_ns
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert (copy / "model.safetensors").stat().st_mtime_ns == stamp  # made once


def test_a_large_checkpoint_gets_no_dense_copy(monkeypatch):
    monkeypatch.setattr(dense, "LARGEST", 1000)
    with pytest.raises(CapacityError, match="dense copy"):
        dense.dense_copy(MODEL)


def test_a_missing_vllm_names_the_extra(tmp_path):
    with pytest.raises(SettingError, match="not an executable") as caught:
        find_executable(str(tmp_path / "vllm"))
    assert "soloist[scaleout]" in caught.value.remedy


def vllm_python() -> str | None:
    """VLLM_PYTHON, or the venv that docs/scaleout.md sets up."""
    given = os.environ.get("VLLM_PYTHON")
    local = Path(__file__).parents[2] / ".oracle/vllm/bin/python"
    return given or (str(local) if local.exists() else None)


MATRIX = [
    dict(values)
    for values in (
        {},
        {"max_len": "auto", "dtype": "bfloat16"},
        {"max_len": "8192", "state_dtype": "float16", "max_seqs": "32", "max_queue": "7"},
        {"generation_defaults": "0", "req_metrics": "0", "log_level": "debug", "threads": "2"},
        {"served_name": "one,two", "api_key": "k", "host": "0.0.0.0", "port": "9001"},
    )
]
ROWS = [
    asked(spec="mtp", draft_tokens=3, prefix_cache=True, kv_format="fp8"),
    asked(spec="dflash2", drafter="/d", dflash_tokens=7, prefix_cache=False, kv_format="int8", vision=True),
    asked(spec="none", lookup=True, kv_format="auto", ctx="long", vision=False),
    asked("cpu", spec="mtp", prefix_cache=True),
]


@pytest.mark.slow
@pytest.mark.skipif(vllm_python() is None, reason="needs a vLLM installation: set VLLM_PYTHON")
def test_vllms_own_parser_accepts_the_matrix(tmp_path):
    config = json.loads((MODEL / "config.json").read_text())
    del config["quantization_config"]  # a dense directory, which the CPU build takes too
    (tmp_path / "config.json").write_text(json.dumps(config))
    commands = [made(flags, device, tmp_path).argv[2:] for flags in MATRIX for device in ("cuda", "cpu")]
    commands.append(made({}, tensor_parallel=2).argv[2:])
    commands += [(str(MODEL), *translate(row).options) for row in ROWS]
    done = subprocess.run(
        [vllm_python(), "-c", PARSE], input=json.dumps(commands), capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-2000:]
    parsed = json.loads(done.stdout.split("\nRESULT")[-1])
    assert len(parsed) == len(commands)
    assert parsed[0]["port"] == "18020" and parsed[0]["enable_auto_tool_choice"] == "True"
    assert parsed[4]["max_model_len"] == "8192" and "float16" in parsed[4]["mamba_ssm_cache_dtype"]
    assert parsed[8]["served_model_name"] == "['one', 'two']" and parsed[8]["port"] == "9001"
    assert parsed[10]["tensor_parallel_size"] == "2"
    assert "mtp" in parsed[11]["speculative_config"] and "fp8" in parsed[11]["kv_cache_dtype"]
    assert "dflash" in parsed[12]["speculative_config"] and "image" in parsed[12]["limit_mm_per_prompt"]


def test_the_number_of_pictures_is_vllms_too() -> None:
    options = translate(asked(spec="none", vision=True, vision_max_images=3)).options
    assert options[options.index("--limit-mm-per-prompt") + 1] == '{"image": 3}'

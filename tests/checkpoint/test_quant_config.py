"""The configuration that is written resolves, by compressed-tensors' own rules, to what the files hold."""

from __future__ import annotations

import pytest
from compressed_tensors.quantization import QuantizationConfig

from soloist.checkpoint.formats.resolve import predict
from soloist.checkpoint.quant_config import Scheme, build

BODY = {"model.layers.0.mlp.up_proj": 128, "model.layers.0.mlp.down_proj": 256, "model.layers.1.mlp.up_proj": 128}
SMALL = {"model.layers.0.linear_attn.in_proj_a": 128}
MTP = {"mtp.fc": 256, "mtp.layers.0.mlp.up_proj": 128}


def modules(**schemes: Scheme | None) -> dict[str, tuple[str, Scheme | None, int]]:
    table: dict[str, tuple[str, Scheme | None, int]] = {name: ("mlp", schemes["body"], k) for name, k in BODY.items()}
    table |= {name: ("deltanet", None, k) for name, k in SMALL.items()}
    table |= {name: ("mtp", schemes["mtp"], k) for name, k in MTP.items()}
    table["lm_head"] = ("lm_head", schemes["lm_head"], 128)
    if schemes.get("embed"):
        table["model.embed_tokens"] = ("embed", schemes["embed"], 128)
    return table


INT4, INT8 = (4, 64, True), (8, 64, True)


@pytest.mark.parametrize(
    "schemes",
    [
        {"body": INT4, "mtp": INT4, "lm_head": INT4},
        {"body": INT4, "mtp": INT8, "lm_head": INT8, "embed": INT8},
        {"body": None, "mtp": None, "lm_head": INT4},
        {"body": None, "mtp": INT4, "lm_head": None, "embed": INT4},
        {"body": INT8, "mtp": None, "lm_head": None},
        {"body": (4, 64, False), "mtp": INT4, "lm_head": INT8},
    ],
)
def test_every_module_resolves_to_its_form(schemes: dict[str, Scheme | None]) -> None:
    table = modules(**schemes)
    config = build(table)
    assert config is not None
    for name, (_, scheme, _k) in table.items():
        module = name.removeprefix("model.")
        assert predict(config, module) == (None if scheme is None else scheme[0]), name
    parsed = QuantizationConfig.model_validate(config)
    assert parsed.format == "pack-quantized"


def test_heads_are_named_even_where_the_class_has_their_form() -> None:
    config = build(modules(body=INT4, mtp=INT4, lm_head=INT4))
    assert config is not None
    assert [group["targets"] for group in config["config_groups"].values()] == [["Linear", r"re:.*lm_head$"]]


def test_one_scale_per_output_is_the_channel_strategy() -> None:
    table = modules(body=None, mtp=None, lm_head=(8, 128, True))
    table |= {name: ("mlp", (8, k, True), k) for name, k in BODY.items()}
    config = build(table)
    assert config is not None
    (group,) = config["config_groups"].values()
    assert group["weights"]["strategy"] == "channel" and group["weights"]["group_size"] is None


def test_a_part_in_two_forms_is_listed_by_name() -> None:
    table = modules(body=INT4, mtp=INT8, lm_head=INT8)
    table["mtp.fc"] = ("mtp", None, 256)
    config = build(table)
    assert config is not None
    assert predict(config, "mtp.fc") is None and predict(config, "mtp.layers.0.mlp.up_proj") == 8


def test_a_dense_layer_beside_quantised_ones_is_ignored_exactly() -> None:
    table = modules(body=INT4, mtp=INT4, lm_head=INT4)
    table["model.layers.1.mlp.up_proj"] = ("mlp", None, 128)
    config = build(table)
    assert config is not None and "model.layers.1.mlp.up_proj" in config["ignore"]
    assert predict(config, "layers.0.mlp.up_proj") == 4 and predict(config, "layers.1.mlp.up_proj") is None


def test_nothing_quantised() -> None:
    assert build(modules(body=None, mtp=None, lm_head=None)) is None

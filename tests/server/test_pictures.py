"""Bytes that call themselves pictures: whatever they hold, they become pixels or a refusal."""

from __future__ import annotations

import io
import random
import warnings

import pytest

from soloist.checkpoint.processor import Processor
from soloist.errors import RequestError
from soloist.server.pictures import FORMATS, PictureRules, Raster, expand, fit, place, rasterise
from tiny_vision import picture

FAMILY = Processor(16, 2, 2, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), 1 / 255, 3, 65_536, 16_777_216)
RULES = PictureRules(FAMILY)


@pytest.mark.parametrize("form", FORMATS)
def test_damaged_files(form: str) -> None:
    rng = random.Random(form)
    file = io.BytesIO()
    picture(1, 40, 30).save(file, format=form)
    whole = file.getvalue()
    outcomes = {"pixels": 0, "refused": 0}
    for _ in range(150):
        data = bytearray(whole[: rng.randrange(len(whole))] if rng.random() < 0.3 else whole)
        for _ in range(rng.choice((0, 1, 2, 8)) if data else 0):
            data[rng.randrange(min(len(data), rng.choice((30, 10_000))))] = rng.randrange(256)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Pillow warns of sizes that are refused afterwards
                raster = rasterise(bytes(data), RULES, "messages.0.content.0")
        except RequestError as error:
            assert error.param == "messages.0.content.0"
            outcomes["refused"] += 1
        else:
            assert raster.pixels.shape == (raster.rows * 32, raster.columns * 32, 3)
            assert raster.tokens <= RULES.max_pixels // 1024
            outcomes["pixels"] += 1
    assert outcomes["refused"] > 0 and outcomes["pixels"] > 0, outcomes


def test_a_file_that_claims_to_be_enormous_is_refused_before_it_is_decoded() -> None:
    file = io.BytesIO()
    picture(1, 40, 30).save(file, format="BMP")
    data = bytearray(file.getvalue())
    data[18:26] = (12_000).to_bytes(4, "little") * 2
    with warnings.catch_warnings(), pytest.raises(RequestError, match="12000 x 12000"):
        warnings.simplefilter("ignore")
        rasterise(bytes(data), RULES, "here")


def test_the_family_takes_1024_pixels_a_token() -> None:
    assert fit(1024, 1024, RULES) == (1024, 1024)
    assert fit(3000, 4000, RULES) == (864, 1152)
    assert fit(10, 10, RULES) == (256, 256)


def test_orientation_is_followed() -> None:
    file = io.BytesIO()
    image = picture(1, 320, 256)
    exif = image.getexif()
    exif[0x0112] = 6  # turn right to show
    image.save(file, format="JPEG", exif=exif, quality=95)
    raster = rasterise(file.getvalue(), RULES, "here")
    assert (raster.rows, raster.columns) == (10, 8)


def _raster(tokens: int) -> Raster:
    return Raster(None, 1, tokens, bytes(16))  # type: ignore[arg-type]


def test_placeholders_belong_to_pictures_in_order() -> None:
    rasters = [_raster(2), _raster(3)]
    assert expand("a<|image_pad|>b<|image_pad|>c", rasters) == f"a{'<|image_pad|>' * 2}b{'<|image_pad|>' * 3}c"
    for text in ("no place", "<|image_pad|>", "<|image_pad|>" * 3):
        with pytest.raises(RequestError, match="2 pictures"):
            expand(text, rasters)
    placed = place([1, 9, 9, 2, 9, 9, 9, 3], 9, rasters)
    assert placed is not None and [(p.start, p.end) for p in placed] == [(1, 3), (4, 7)]
    assert place([1, 9, 9, 2, 9, 9, 3], 9, rasters) is None
    assert place([9, 1, 9, 9, 9, 9], 9, rasters) is None

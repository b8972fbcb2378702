"""Pictures of a request: found in its messages, fetched, decoded and scaled, then placed among the prompt's ids.

| what a client sends                                     | what becomes of it                                        |
|---------------------------------------------------------|-----------------------------------------------------------|
| a data URL (`data:image/png;base64,...`)                | decoded; broken base64 or no picture in it: 400           |
| an http or https address                                | 400 naming VISION_URLS, unless that is on; then fetched   |
| more pixels than VISION_MAX_PIXELS or the processor's   | scaled down, sides kept in proportion                     |
| more pictures than VISION_MAX_IMAGES, history included  | 400 naming VISION_MAX_IMAGES                              |
| transparency                                            | laid over white                                           |
| an animation                                            | its first frame                                           |
| the placeholder's own text in a message with pictures   | 400: it would stand for a picture that is not there       |

In the text of a prompt a picture is one placeholder per row of it, so token counts and remembered transcripts need no
rule of their own.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch

from soloist.engine.request import Picture
from soloist.engine.vision import Processor
from soloist.errors import RequestError

PLACEHOLDER = "<|image_pad|>"
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_SOURCE_PIXELS = 128 << 20  # what a file may claim to hold before it is decoded
MAX_RATIO = 200
FETCH_S = 20.0


@dataclass(frozen=True)
class PictureRules:
    """How pictures are taken. `limit` pictures of at most `max_pixels` pixels; `max_bytes` bounds a fetched file."""

    processor: Processor
    limit: int = 1
    max_pixels: int = 1 << 20
    fetch: bool = False
    max_bytes: int = 32 << 20


@dataclass(frozen=True)
class Raster:
    """A decoded picture, not yet placed: pixels uint8 [H, W, 3] and its size in placeholders."""

    pixels: torch.Tensor
    rows: int
    columns: int
    digest: bytes

    @property
    def tokens(self) -> int:
        return self.rows * self.columns


def address_of(part: dict[str, Any], place: str) -> str:
    """The address of a picture part in any of the protocols' forms. Raises RequestError naming the place."""
    if part.get("file_id") is not None:
        raise RequestError(f"{place}: files are not stored here.", "Send the picture as a data URL.", param=place)
    given = part.get("image_url", part.get("image"))
    url = given.get("url") if isinstance(given, dict) else given
    if not isinstance(url, str):
        raise RequestError(f"{place} has no image_url.", "Send a data URL.", param=place)
    return url


def fit(height: int, width: int, rules: PictureRules) -> tuple[int, int]:
    """The size a picture is scaled to: sides multiples of a merged patch, area within bounds, proportions kept."""
    factor = rules.processor.factor
    largest = max(factor**2, min(rules.processor.largest, rules.max_pixels))
    smallest = min(rules.processor.smallest, largest)
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    if rows * columns > largest:
        shrink = math.sqrt(height * width / largest)
        rows = max(factor, math.floor(height / shrink / factor) * factor)
        columns = max(factor, math.floor(width / shrink / factor) * factor)
    elif rows * columns < smallest:
        grow = math.sqrt(smallest / (height * width))
        rows, columns = math.ceil(height * grow / factor) * factor, math.ceil(width * grow / factor) * factor
    return rows, columns


def rasterise(data: bytes, rules: PictureRules, place: str) -> Raster:
    """Decode and scale the bytes of a picture file. Raises RequestError for what is none."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            if width * height > MAX_SOURCE_PIXELS or max(width, height) > MAX_RATIO * min(width, height):
                raise RequestError(
                    f"{place}: a picture of {width} x {height} pixels is too large or too narrow.", param=place
                )
            upright = ImageOps.exif_transpose(image)
            rgb = _on_white(upright)
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise RequestError(
            f"{place} is not a picture that can be read ({error}).",
            f"Known formats: {', '.join(FORMATS)}.",
            param=place,
        ) from None
    rows, columns = fit(rgb.height, rgb.width, rules)
    if (rgb.height, rgb.width) != (rows, columns):
        rgb = rgb.resize((columns, rows), resample=Image.Resampling(rules.processor.resample))
    raw = rgb.tobytes()
    pixels = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(rows, columns, 3)
    # The tower's code takes part in what its rows are: entries of another version must not be found.
    print_ = hashlib.blake2b(f"{_tower_version()} {rows} {columns} {rules.processor}".encode(), digest_size=16)
    print_.update(raw)
    factor = rules.processor.factor
    return Raster(pixels, rows // factor, columns // factor, print_.digest())


def _on_white(image: Any) -> Any:
    from PIL import Image

    if "A" in image.getbands() or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image)
    return image.convert("RGB")


def _tower_version() -> str:
    try:
        return metadata.version("transformers")
    except metadata.PackageNotFoundError:
        return ""


def decode_data_url(url: str, place: str) -> bytes:
    """The bytes of a base64 data URL. Raises RequestError for a broken one."""
    head, comma, body = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise RequestError(f"{place}: the data URL is not base64.", "Write data:image/png;base64,...", param=place)
    try:
        return base64.b64decode("".join(body.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"{place}: the base64 data is broken ({error}).", param=place) from None


def is_web(url: str) -> bool:
    return url.partition(":")[0].lower() in ("http", "https")


def inline_bytes(url: str, place: str) -> bytes:
    """The bytes of a data URL; RequestError for any other address."""
    if is_web(url):
        raise RequestError(
            f"{place} is a web address, and none is fetched (VISION_URLS=0).",
            "Send the picture as a data URL, or serve with VISION_URLS=1.",
            param=place,
        )
    if not url.lower().startswith("data:"):
        raise RequestError(f"{place}: the address is neither a data URL nor http.", "Send a data URL.", param=place)
    return decode_data_url(url, place)


async def _fetch(url: str, max_bytes: int, place: str) -> bytes:
    import httpx

    data = bytearray()
    try:
        async with (
            asyncio.timeout(FETCH_S),
            httpx.AsyncClient(follow_redirects=True, max_redirects=3) as client,
            client.stream("GET", url) as response,
        ):
            response.raise_for_status()
            async for chunk in response.aiter_bytes():
                data += chunk
                if len(data) > max_bytes:
                    raise RequestError(f"{place}: the file is larger than {max_bytes >> 20} MiB.", param=place)
    except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
        reason = str(error) or type(error).__name__
        raise RequestError(f"{place} cannot be fetched ({reason}).", "Send a data URL.", param=place) from None
    return bytes(data)


def _addresses(messages: Sequence[dict[str, Any]], rules: PictureRules | None) -> list[tuple[str, str]]:
    """(address, place) of every picture of normalised messages, in order. RequestError for more than are taken."""
    found: list[tuple[str, str]] = []
    texts: list[str] = []
    for message in messages:
        parts = message["content"] if isinstance(message["content"], list) else []
        found += [(part["image_url"]["url"], part["place"]) for part in parts if part["type"] == "image"]
        texts += [part.get("text", "") for part in parts] or [message["content"]]
    if not found:
        return []
    assert rules is not None
    if len(found) > rules.limit:
        raise RequestError(
            f"The prompt holds {len(found)} pictures; this server takes {rules.limit} (VISION_MAX_IMAGES).",
            "Leave older pictures out, or raise VISION_MAX_IMAGES.",
            param="messages",
        )
    if any(PLACEHOLDER in text for text in texts):
        raise RequestError(f"{PLACEHOLDER} cannot be written in a message beside a picture.", param="messages")
    return found


async def load(messages: Sequence[dict[str, Any]], rules: PictureRules | None) -> list[Raster]:
    """The pictures of normalised messages in the order of their parts, fetched where need be, decoded on a thread."""
    rasters = []
    for url, place in _addresses(messages, rules):
        assert rules is not None
        if is_web(url) and rules.fetch:
            data = await _fetch(url, rules.max_bytes, place)
        else:
            data = inline_bytes(url, place)
        rasters.append(await asyncio.to_thread(rasterise, data, rules, place))
    return rasters


def load_inline(messages: Sequence[dict[str, Any]], rules: PictureRules | None) -> list[Raster]:
    """`load` for callers without an event loop: data URLs only."""
    found = _addresses(messages, rules)
    return [rasterise(inline_bytes(url, place), rules, place) for url, place in found if rules is not None]


def expand(text: str, rasters: Sequence[Raster]) -> str:
    """The rendered text with as many placeholders as each picture has rows. RequestError if the template drops any."""
    if not rasters:
        return text
    pieces = text.split(PLACEHOLDER)
    if len(pieces) != len(rasters) + 1:
        raise RequestError(
            f"The chat template shows {len(pieces) - 1} places for {len(rasters)} pictures.",
            "Use the chat template of a vision model, and keep its placeholder out of texts.",
            param="messages",
        )
    out = [pieces[0]]
    for raster, piece in zip(rasters, pieces[1:], strict=True):
        out += [PLACEHOLDER * raster.tokens, piece]
    return "".join(out)


def place(ids: Sequence[int], pad: int | None, rasters: Sequence[Raster]) -> tuple[Picture, ...] | None:
    """Where each picture stands in a prompt; None if the placeholders among the ids are not those of the pictures."""
    at = [i for i, token in enumerate(ids) if token == pad]
    if len(at) != sum(raster.tokens for raster in rasters):
        return None
    placed = []
    for raster in rasters:
        mine, at = at[: raster.tokens], at[raster.tokens :]
        if mine[-1] - mine[0] != len(mine) - 1:
            return None
        placed.append(Picture(raster.pixels, raster.rows, raster.columns, mine[0], raster.digest))
    return tuple(placed)

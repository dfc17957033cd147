"""Pictures as bytes: size and pixels agree with transformers'; damaged ones are refused."""

import io
import zlib
from pathlib import Path

import numpy
import pytest
from PIL import Image
from transformers.image_utils import load_image

from common.pictures import FORMATS, PictureError, check_pixels, decoded, read_size


def picture(
    kind: str = "PNG", size: tuple[int, int] = (6, 4), mode: str = "RGB", orientation: int = 1
) -> bytes:
    image = Image.effect_noise(size, 80).convert(mode)
    exif = Image.Exif()
    exif[0x0112] = orientation
    target = io.BytesIO()
    image.save(target, kind, **({"exif": exif} if kind in ("JPEG", "PNG", "WEBP") else {}))
    return target.getvalue()


@pytest.mark.parametrize("kind", FORMATS)
def test_size_and_pixels_of_each_format(kind: str) -> None:
    content = picture(kind)
    assert read_size(content) == (4, 6)
    assert decoded(content).size == (6, 4)
    assert decoded(content).mode == "RGB"


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_picture_is_upright_as_transformers_has_it(orientation: int, tmp_path: Path) -> None:
    content = picture("JPEG", orientation=orientation)
    path = tmp_path / "picture.jpg"
    path.write_bytes(content)
    expected = load_image(str(path))
    height, width = read_size(content)
    assert (width, height) == expected.size
    assert numpy.array_equal(numpy.asarray(decoded(content)), numpy.asarray(expected))


@pytest.mark.parametrize("mode", ("P", "RGBA", "1", "CMYK"))
def test_other_modes_become_rgb(mode: str) -> None:
    assert decoded(picture("TIFF", mode=mode)).mode == "RGB"


def test_the_first_frame_of_an_animation_counts() -> None:
    frames = [Image.new("RGB", (6, 4), color) for color in ("red", "blue")]
    target = io.BytesIO()
    frames[0].save(target, "GIF", save_all=True, append_images=frames[1:])
    assert decoded(target.getvalue()).getpixel((0, 0)) == (255, 0, 0)


@pytest.mark.parametrize(
    "content", (b"", b"<svg/>", b"%PDF-1.7", b"\x89PNG\r\n\x1a\n", b"GIF89a", bytes(1000))
)
def test_what_is_no_picture_is_refused(content: bytes) -> None:
    with pytest.raises(PictureError, match=r"is no picture of a known format|is damaged"):
        read_size(content)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_picture_that_ends_too_early_is_refused(kind: str) -> None:
    """Whatever is cut off: nothing but a PictureError comes out."""
    content = picture(kind, size=(64, 64))
    for length in range(0, len(content) // 2, max(1, len(content) // 97)):
        with pytest.raises(PictureError):
            decoded(content[:length])
    check_pixels(content)
    with pytest.raises(PictureError, match=r"is damaged|is no picture"):
        check_pixels(content[: len(content) // 2])


def test_a_header_with_too_many_pixels_is_read_without_decoding() -> None:
    """A bomb: a small file of a giant picture. Pillow's own bound is far above that of the gateway."""
    target = io.BytesIO()
    Image.new("1", (12_000, 12_000)).save(target, "PNG")
    assert len(target.getvalue()) < 50_000
    assert read_size(target.getvalue()) == (12_000, 12_000)
    header = bytearray(picture())
    header[16:24] = (100_000).to_bytes(4, "big") * 2
    header[29:33] = zlib.crc32(header[12:29]).to_bytes(4, "big")
    with pytest.raises(PictureError, match="has too many pixels"):
        read_size(bytes(header))

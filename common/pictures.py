"""Pictures as bytes: their size, read from the header alone, and their pixels. Gateways read sizes, engines
decode; both take a picture upright, as its EXIF data says.
"""

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

Size = tuple[int, int]
"""Height and width of a picture in pixels, upright."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""What is decoded; of an animation or several pages the first."""
LYING = range(5, 9)
"""EXIF's orientations of pictures that are turned by a quarter."""


class PictureError(ValueError):
    """A picture cannot be served; the text says why, as the end of a sentence about it."""


@contextmanager
def opened(content: bytes) -> Iterator[Image.Image]:
    """A picture whose header is read. Raises PictureError, also for what goes wrong with it inside."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the callers have limits of their own
            with Image.open(io.BytesIO(content), formats=FORMATS) as image:
                yield image
    except UnidentifiedImageError as error:
        raise PictureError(f"is no picture of a known format ({', '.join(FORMATS)})") from error
    except Image.DecompressionBombError as error:
        raise PictureError("has too many pixels") from error
    except PictureError:
        raise
    except Exception as error:  # Pillow may raise anything for damaged files
        raise PictureError(f"is damaged: {error!s:.100}") from error


def read_size(content: bytes) -> Size:
    """Height and width in pixels of the upright picture; no pixel is decoded. Raises PictureError."""
    with opened(content) as image:
        width, height = image.size
        is_lying = image.getexif().get(ExifTags.Base.Orientation) in LYING
        return (width, height) if is_lying else (height, width)


def check_pixels(content: bytes) -> None:
    """Decode a picture and drop it; a JPEG at an eighth of its size. Raises PictureError."""
    with opened(content) as image:
        image.draft("RGB", (image.width // 8, image.height // 8))
        image.load()


def decoded(content: bytes) -> Image.Image:
    """The upright picture in RGB, as transformers' `load_image` has it. Raises PictureError."""
    with opened(content) as image:
        return ImageOps.exif_transpose(image).convert("RGB")

"""KV numbers: K and V as the cache holds them, in the model's dtype or in 8-bit floats.

8-bit floats hold a number divided by its layer's scale, and no further from zero than the largest of their
dtype.
"""

import torch

FLOATS8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""By KV_CACHE_DTYPE."""


def to_kv(numbers: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """numbers [...] of a model's dtype → the same shape in the cache's dtype"""
    if dtype not in FLOATS8.values():
        return numbers
    largest = torch.finfo(dtype).max
    return (numbers.float() / scale).clamp(-largest, largest).to(dtype)


def from_kv(pages: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """pages [...] of the cache's dtype → the same shape in the model's dtype"""
    return pages if pages.dtype == dtype else pages.to(dtype) * scale


def raw(pages: torch.Tensor) -> torch.Tensor:
    """pages [...] of the cache's dtype → a view that torch can index: 8-bit floats as uint8"""
    return pages.view(torch.uint8) if pages.dtype in FLOATS8.values() else pages
